// WKV-7 decoding for many sequences, to be compiled behind base.cu, heads.cu and wkv7.cu: the arithmetic of `decode`, with Q
// states a block, all on their way to shared memory before the block waits for the kernel in front.
//
// Four key rows of a state stand together, then 16 spare bytes: the 8 lanes that share a state row read eight of these
// pieces at once, and so from different banks.
//
// Q: states of a block · GROUPS: how many of them at a time, 2 * DP threads each · BULK: states come by bulk copies
// (compute capability 9.0), else by cp.async · LEAVE: 0 states leave from registers, 1 the same, streaming, 2 by bulk copies.

#define PIECE (4 * D * 4 + 16)
#define STATE_ROOM (D / 4 * PIECE)
#define MANY_THREADS (2 * DP * GROUPS)

__device__ __forceinline__ void copy_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void all_copied() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ void make_barrier(unsigned at) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_in(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk_out(void* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_gone() {
  asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void seen_by_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ int has_come(unsigned barrier) {
  int is_so;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
               : "=r"(is_so) : "r"(barrier) : "memory");
  return is_so;
}
__device__ __forceinline__ void wait_at(unsigned barrier) {  // a mistake shall end the kernel, not hang it
  for (int tries = 0; !has_come(barrier); tries++)
    if (tries > 1 << 22) asm volatile("trap;");
}
__device__ __forceinline__ void group_sync(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(2 * DP) : "memory");
}
__device__ __forceinline__ void stream_out(float* to, float4 x) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

extern "C" __global__ void __launch_bounds__(MANY_THREADS) decode_many(
    const elem* projected, const elem* low, elem* v_first, const float* vectors, float* state, const int* slots, elem* out,
    int projected_stride, int low_stride, int width, int first_layer, float eps, int begin_next, int states) {
  extern __shared__ __align__(128) unsigned char room[];  // [Q, STATE_ROOM]
  __shared__ __align__(16) float made[Q * P_COUNT * DP];
  __shared__ float y_all[Q * DP];
  __shared__ unsigned long long arrived[Q];
  const int heads = width / D, first = blockIdx.x * Q, count = min(states - first, Q);
  const int warp = threadIdx.x / 32, group = threadIdx.x / (2 * DP), row = threadIdx.x % (2 * DP) / LANES * 4;
  const int lane = threadIdx.x % LANES;
  const unsigned room_at = (unsigned)__cvta_generic_to_shared(room), arrived_at = (unsigned)__cvta_generic_to_shared(arrived);
  const Inputs in = {projected, low, v_first, vectors, projected_stride, low_stride, width, first_layer};
  auto state_of = [&](int q) {
    const int n = (first + q) / heads, h = (first + q) % heads;
    return state + ((size_t)slots[n] * heads + h) * D * D;
  };
  if (begin_next == 1) let_next_begin();
#if BULK
  if (threadIdx.x < Q) make_barrier(arrived_at + threadIdx.x * 8);
  if (threadIdx.x < Q) barriers_made();
  __syncthreads();
  for (int i = threadIdx.x; i < count * (D / 4); i += MANY_THREADS) {
    const int q = i / (D / 4), piece = i % (D / 4);
    if (piece == 0) expect(arrived_at + q * 8, D * D * 4);
    bulk_in(room_at + q * STATE_ROOM + piece * PIECE, state_of(q) + piece * 4 * D, 4 * D * 4, arrived_at + q * 8);
  }
#else
  for (int q = 0; q < count; q++) {
    const float* from = state_of(q);
    #pragma unroll
    for (int i = threadIdx.x; i < D * D / 4; i += MANY_THREADS)
      copy_16(room_at + q * STATE_ROOM + i / D * PIECE + i % D * 16, from + i * 4);
  }
#endif
  // a warp for each state makes its vectors and ends it
  const bool has_own = warp < count;
  const int own_n = (first + min(warp, count - 1)) / heads, own_h = (first + min(warp, count - 1)) % heads;
  Known known;
  float gate[CHUNKS];
  if (has_own) known.load(vectors, width, own_h);
  wait_for_inputs();
  if (has_own) {
    const LowInMemory own_low(in, own_n, own_h);
    Raw raw;
    raw.load(in, own_n, own_h);
    load_gates(own_low, gate);
    prepare_head(in, raw, own_low, known, own_n, own_h, made + warp * P_COUNT * DP);
  }
#if !BULK
  all_copied();
#endif
  __syncthreads();
  for (int q = group; q < count; q += GROUPS) {
    float s[4][COLS], y[4];
    Vectors<4> m;
    m.load(made + q * P_COUNT * DP, row);
#if BULK
    wait_at(arrived_at + q * 8);
#endif
    unsigned char* here = room + q * STATE_ROOM + row * 4;
    #pragma unroll
    for (int c = 0; c < COLS; c++) {
      const float4 x = *(const float4*)(here + ((c / 4) * LANES + lane) * PIECE + c % 4 * (D * 4));
      s[0][c] = x.x; s[1][c] = x.y; s[2][c] = x.z; s[3][c] = x.w;
    }
    advance<4>(s, m, y);
    const float sum = scattered_sum<4>(y);
    if (lane % 2 == 0) y_all[q * DP + row + lane / 2] = sum;
    float* to = state_of(q);
#if LEAVE == 0
    move_state<4, true>(s, to, row);
#else
    #pragma unroll
    for (int c = 0; c < COLS; c++) {
      const float4 x = make_float4(s[0][c], s[1][c], s[2][c], s[3][c]);
      const int piece = (c / 4) * LANES + lane;
#if LEAVE == 1
      stream_out(to + (piece * 4 + c % 4) * D + row, x);
#else
      *(float4*)(here + piece * PIECE + c % 4 * (D * 4)) = x;
#endif
    }
#if LEAVE == 2
    seen_by_bulk();
    group_sync(group);
    const int piece = threadIdx.x % (2 * DP);
    if (piece < D / 4) bulk_out(to + piece * 4 * D, room_at + q * STATE_ROOM + piece * PIECE, 4 * D * 4);
#endif
#endif
  }
  __syncthreads();
  if (begin_next == 2) let_next_begin();
  if (has_own)
    finish_head(known, gate, made + warp * P_COUNT * DP, y_all + warp * DP, out + (size_t)own_n * width + own_h * D, eps);
#if LEAVE == 2
  if (threadIdx.x % (2 * DP) < D / 4) bulk_gone();
#endif
}
