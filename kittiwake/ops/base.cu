// What every kernel in CUDA C++ begins with: the activations' type, and how a launch waits for the one in front.
//
// DT: 0 float32, 1 float16, 2 bfloat16 (activations).

typedef unsigned short u16;
// widen: exact · round_only: as a product is rounded, to infinity where float16 cannot hold it
#if DT == 0
typedef float elem;
__device__ __forceinline__ float widen(elem x) { return x; }
__device__ __forceinline__ elem round_only(float x) { return x; }
#elif DT == 1
typedef u16 elem;
__device__ __forceinline__ float widen(elem x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ elem round_only(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#else
typedef u16 elem;
__device__ __forceinline__ float widen(elem x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ elem round_only(float x) { u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#endif
__device__ __forceinline__ elem narrow(float x) {  // what float16 cannot hold becomes its largest number, not infinity
#if DT == 1
  x = x < -65504.f ? -65504.f : x > 65504.f ? 65504.f : x;
#endif
  return round_only(x);
}

__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float warp_sum(float x) {
  #pragma unroll
  for (int apart = 16; apart; apart >>= 1) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

#if DT != 0
// m16n8k16: 16 products are added to each of a warp's sums, of which a lane has 4.
__device__ __forceinline__ void add_products(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if DT == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
