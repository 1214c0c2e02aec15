// The product of narrow.cu by Hopper's warpgroup instruction, to be compiled behind it: weights are the instruction's 64
// rows, x its N columns, both read from shared memory, K in order by 16, so the bits ought to be those of m16n8k16; its
// accumulator stays in the matrix unit, so a step of the chain should take some 18 cycles where m16n8k16 takes 33.
//
// Needs sm_90a. BN: output columns of a block, at most 64; where it is less, the other rows of the instruction read what
// lies behind and make nothing · ROWS: 1, 8, 16 or 32 · BK, STAGES: as in narrow.cu, STAGES - 2 of them ahead · PITCH: bytes
// from one piece of 8 rows by 8 k to the next along K, 16 more than it holds so that copies meet no bank twice · SWAPS: 1
// takes the two strides of a descriptor the other way round · FENCES: 1 as the language asks for, 0 to see what that costs.

#define NCOLS (ROWS < 8 ? 8 : ROWS)
#define GROUP_BYTES (BK / 8 * PITCH)  // 8 rows of a stage
#define W_STAGE (BN / 8 * GROUP_BYTES)
#define X_STAGE (NCOLS / 8 * GROUP_BYTES)
#define AHEAD (STAGES - 2)

__device__ __forceinline__ unsigned long long descriptor(unsigned at) {
  const unsigned long long along = SWAPS ? GROUP_BYTES : PITCH, across = SWAPS ? PITCH : GROUP_BYTES;
  return (unsigned long long)(at >> 4 & 0x3fff) | along >> 4 << 16 | across >> 4 << 32;
}
__device__ __forceinline__ void begin_sums() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_sums() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_sums() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
__device__ __forceinline__ void seen_by_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#if DT == 1
#define TYPES ".f32.f16.f16"
#else
#define TYPES ".f32.bf16.bf16"
#endif
#define TAIL ", 1, 1, 1, 0, 0;"
__device__ __forceinline__ void sum_16(float (&d)[NCOLS / 2], unsigned long long w, unsigned long long x) {
#if NCOLS == 8
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16" TYPES " {%0, %1, %2, %3}, %4, %5" TAIL
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(w), "l"(x));
#elif NCOLS == 16
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16" TYPES " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9" TAIL
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(w), "l"(x));
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16" TYPES
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17" TAIL
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "l"(w), "l"(x));
#endif
}

extern "C" __global__ void __launch_bounds__(128) wide_product(
    const elem* __restrict__ x, const elem* __restrict__ w, out_t* __restrict__ y, const long long* __restrict__ lines,
    const int* __restrict__ activations, int rows, int x_stride, int x_group, int y_stride, int begin_next) {
  extern __shared__ __align__(16) elem shared[];
  const unsigned w_at = (unsigned)__cvta_generic_to_shared(shared), x_at = w_at + STAGES * W_STAGE;
  if (begin_next == 1) let_next_begin();
  const int column = blockIdx.x * BN, inner = BN < 32 ? column % 32 : 0;
  const long long* line = lines + column / 32 * 6;
  const int depth = (int)line[3], w_stride = (depth + 15) / 16 * 16;
  const int own_rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
  const int steps = (depth + BK - 1) / BK;
  // A thread copies 16 bytes of every SKIP-th row; rows own_row + i * SKIP are sums without a carry into the eights.
  constexpr unsigned PER_ROW = BK / 8, SKIP = 128 / PER_ROW;
  const unsigned own_row = threadIdx.x / PER_ROW, own_k = threadIdx.x % PER_ROW * 8;
  const unsigned own_at = own_k / 8 * PITCH + own_row * 16;
  const char* w_from = (const char*)(w + line[2] + (size_t)(inner + own_row) * w_stride + own_k);
  const char* x_from = (const char*)(x + line[0] * x_group + line[1] + (size_t)(blockIdx.y * ROWS + own_row) * x_stride + own_k);
  const size_t w_skip = (size_t)SKIP * w_stride * 2, x_skip = (size_t)SKIP * x_stride * 2;
  auto place = [](int row) { return row / 8 * GROUP_BYTES + row % 8 * 16; };
  auto fetch_w = [&](int step) {
    const unsigned to = w_at + own_at + step % STAGES * W_STAGE;
    const char* from = w_from + (size_t)step * (BK * 2);
    const int bytes = step * BK + (int)own_k < w_stride ? 16 : 0, is_wanted = step < steps;
    #pragma unroll
    for (int i = 0; i < BN; i += SKIP, from += w_skip) copy_ahead(to + place(i), from, bytes, is_wanted);
  };
  auto fetch_x = [&](int step) {
    const unsigned to = x_at + own_at + step % STAGES * X_STAGE;
    const char* from = x_from + (size_t)step * (BK * 2);
    const int bytes = min(max((depth - step * BK - (int)own_k) * 2, 0), 16), wanted = step < steps ? own_rows - (int)own_row : 0;
    #pragma unroll
    for (int i = 0; i < ROWS; i += SKIP, from += x_skip) copy_ahead(to + place(i), from, bytes, i < wanted);
  };
  #pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    fetch_w(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // rows that do not exist are zero in every stage
  for (int s = 0; s < STAGES; s++)
    for (int row = own_row; row < NCOLS; row += SKIP)
      if (row >= own_rows)
        *(uint4*)((char*)shared + STAGES * W_STAGE + s * X_STAGE + own_k / 8 * PITCH + place(row)) = make_uint4(0, 0, 0, 0);
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  #pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    fetch_x(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  float d[NCOLS / 2];
  #pragma unroll
  for (int i = 0; i < NCOLS / 2; i++) d[i] = 0.f;
  for (int step = 0; step < steps; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    if (FENCES) seen_by_units();
    __syncthreads();
    const unsigned w_now = w_at + step % STAGES * W_STAGE, x_now = x_at + step % STAGES * X_STAGE;
    begin_sums();
    #pragma unroll
    for (int k = 0; k < BK / 8; k += 2) sum_16(d, descriptor(w_now + k * PITCH), descriptor(x_now + k * PITCH));
    end_sums();
    fetch_w(step + AHEAD);  // into the stage before the last: every warp has waited for its sums
    fetch_x(step + AHEAD);
    asm volatile("cp.async.commit_group;" ::: "memory");
    await_sums<1>();
  }
  await_sums<0>();
  if (begin_next == 2) let_next_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < NCOLS / 2; i++) {
    const int at = warp * 16 + lane / 4 + i / 2 % 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (at < BN && row < own_rows && at < columns) {
      float value = d[i];
      if (activation) value = activated(widen(round_only(value)), activation);
      out_t* to = y + ((size_t)blockIdx.y * ROWS + row) * y_stride + first + at;
#if OUT32
      *to = value;
#else
      *to = round_only(value);
#endif
    }
  }
}
