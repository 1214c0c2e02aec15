// Products in float32: every sum is one chain of fused multiply-adds over K in order, whatever the tiling and the number of
// rows, as in the in-order kernel of triton.py (layers/cuda_probe.py proves it). Follows narrow.cu, compiled with DT 0.
//
// A block makes BM rows of BN columns, a thread TM of the rows and TN of the columns. Weights and rows are staged ahead
// through shared memory, BK of K in each of STAGES; the first stages of the weights are fetched before the kernel in front
// has ended: weights do not depend on it. A thread reads fours of K ahead of those it multiplies, the more of them the
// fewer products each has: a read takes some 30 cycles, and as many again while the other warps' are served.

#define ROW (BK + 4)  // shared rows of 16 bytes more: eight that lie side by side meet in no bank
#define TX (BN / TN)
#define TY (BM / TM)
#define THREADS (TX * TY)
#define PIECES (BK / 4)  // of 16 bytes, in a row of a stage
#define AHEAD (TM + TN <= 4 ? 3 : TM + TN <= 6 ? 2 : 1)  // fours of K
#define FOURS (AHEAD == 1 ? 2 : 4)
static_assert(TX % 8 == 0 && TY % 4 == 0, "a warp has 4 rows of threads and 8 columns of them");
static_assert(THREADS % PIECES == 0 || PIECES % THREADS == 0, "a thread copies pieces that lie evenly apart");
static_assert(PIECES % FOURS == 0, "the fours of a stage have fixed registers");
static_assert(STAGES >= 2, "one stage is read while another is fetched");

__device__ __forceinline__ void copy_16(unsigned to, const float* from, int bytes) {  // the rest of 16 bytes is zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void add_four(float& sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum); sum = fmaf(a.y, b.y, sum); sum = fmaf(a.z, b.z, sum); sum = fmaf(a.w, b.w, sum);
}

// Four of K, of the rows and of the columns of a thread. A warp's 8 columns of threads are lanes / 2 % 8, its 4 rows the
// other bits of a lane: each half of a warp then reads 8 pieces of the columns and 2 of the rows, one pass over the banks.
struct Four {
  float4 a[TM], b[TN];
  __device__ __forceinline__ void load(const float* a_at, const float* b_at) {
    #pragma unroll
    for (int i = 0; i < TM; i++) a[i] = *(const float4*)(a_at + i * TY * ROW);
    #pragma unroll
    for (int j = 0; j < TN; j++) b[j] = *(const float4*)(b_at + j * TX * ROW);
  }
  __device__ __forceinline__ void add_to(float (&sums)[TM][TN]) const {
    #pragma unroll
    for (int i = 0; i < TM; i++)
      #pragma unroll
      for (int j = 0; j < TN; j++) add_four(sums[i][j], a[i], b[j]);
  }
};

// A thread's part of copying a stage: pieces THREADS apart of COUNT rows, from where `from` and `k` say for the first one.
// Zeros stand for what is behind `rows` (if not ALL) or behind `depth`.
template <int COUNT, bool ALL>
__device__ __forceinline__ void copy_rows(
    unsigned to, const float* from, const float* safe, size_t stride, int row, int rows, int k, int depth) {
  constexpr int EACH = THREADS > PIECES ? THREADS / PIECES : 1, TURNS = THREADS < PIECES ? PIECES / THREADS : 1;
  #pragma unroll
  for (int i = 0; i * EACH < COUNT; i++) {
    if (COUNT % EACH && row + i * EACH >= COUNT) break;
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int apart = turn * THREADS * 4;
      const int bytes = (ALL || row + i * EACH < rows) && k + apart < depth ? 16 : 0;
      copy_16(to + (i * EACH * ROW + apart) * 4, ALL || bytes ? from + apart : safe, bytes);
    }
    from += EACH * stride;
  }
}

// lines: int64 [columns / 32, 6]: input, first column of x, first element of w, depth, first column of y, columns left.
// begin_next: when the next kernel may begin: 0 when this one has ended, 1 at once, 2 when the sums are done.
extern "C" __global__ void __launch_bounds__(TX * TY) product_float32(
    const float* x, const float* w, float* y, const long long* lines, const int* activations, int rows, int x_stride,
    int x_group, int y_stride, int begin_next) {
  extern __shared__ __align__(16) float shared[];  // [STAGES, BN, ROW] weights, [STAGES, BM, ROW] rows
  float* const rows_at = shared + STAGES * BN * ROW;
  if (begin_next == 1) let_next_begin();
  const int column = blockIdx.x * BN, inner = column % 32, first_row = blockIdx.y * BM;
  const long long* line = lines + column / 32 * 6;
  const int depth = (int)line[3], w_stride = (depth + 15) / 16 * 16, steps = (depth + BK - 1) / BK;
  const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES * 4;  // of the first piece that a thread copies
  const float* const w_first = w + line[2] + (size_t)inner * w_stride;
  const float* const x_first = x + line[0] * x_group + line[1];
  const float* w_from = w_first + (size_t)row * w_stride + piece;
  const float* x_from = x_first + (size_t)(first_row + row) * x_stride + piece;
  const unsigned w_to = (unsigned)__cvta_generic_to_shared(shared) + (row * ROW + piece) * 4;
  const unsigned x_to = (unsigned)__cvta_generic_to_shared(rows_at) + (row * ROW + piece) * 4;
  auto fetch_w = [&](int step, int stage) {
    if (step < steps)
      copy_rows<BN, true>(w_to + stage * (BN * ROW * 4), w_from + step * BK, w_first, w_stride, row, BN,
                          step * BK + piece, w_stride);
  };
  auto fetch_x = [&](int step, int stage) {
    if (step < steps)
      copy_rows<BM, false>(x_to + stage * (BM * ROW * 4), x_from + step * BK, x_first, x_stride, row, rows - first_row,
                           step * BK + piece, depth);
  };
  for (int s = 0; s < STAGES - 1; s++) fetch_w(s, s);
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  for (int s = 0; s < STAGES - 1; s++) {
    fetch_x(s, s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // what a thread computes lies TY rows and TX columns apart
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tx = warp % (TX / 8) * 8 + lane / 2 % 8, ty = warp / (TX / 8) * 4 + lane / 16 * 2 + lane % 2;
  const float* const b_at = shared + tx * ROW;
  const float* const a_at = rows_at + ty * ROW;
  float sums[TM][TN];
  #pragma unroll
  for (int i = 0; i < TM; i++)
    #pragma unroll
    for (int j = 0; j < TN; j++) sums[i][j] = 0.f;
  Four fours[FOURS];
  int stage = 0;
  auto read = [&](Four& to, int k) { to.load(a_at + stage * (BM * ROW) + k, b_at + stage * (BN * ROW) + k); };
  auto wait_for_stage = [&]() {  // then nobody reads the stage before it any more
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
  };
  auto fetch_behind = [&](int step) {  // into the stage before this one
    const int to = stage == 0 ? STAGES - 1 : stage - 1;
    fetch_w(step + STAGES - 1, to);
    fetch_x(step + STAGES - 1, to);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  wait_for_stage();
  #pragma unroll
  for (int i = 0; i < AHEAD; i++) read(fours[i], i * 4);
  fetch_behind(0);
  const int whole = depth / BK;
  for (int step = 0; step < whole; step++) {
    #pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int next = i + AHEAD;
      if (next == PIECES) {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        wait_for_stage();
      }
      if (next < PIECES || step + 1 < steps) read(fours[next % FOURS], next % PIECES * 4);
      if (next == PIECES) fetch_behind(step + 1);
      fours[i % FOURS].add_to(sums);
    }
  }
  for (int k = 0; k < depth - whole * BK; k += 4) {
    read(fours[0], k);
    fours[0].add_to(sums);
  }
  if (begin_next == 2) let_next_begin();
  if (activation) {
    #pragma unroll
    for (int i = 0; i < TM; i++)
      #pragma unroll
      for (int j = 0; j < TN; j++) sums[i][j] = activated(sums[i][j], activation);
  }
  #pragma unroll
  for (int i = 0; i < TM; i++) {
    #pragma unroll
    for (int j = 0; j < TN; j++) {
      const int row = first_row + ty + i * TY, at = tx + j * TX;
      if (row < rows && at < columns) y[(size_t)row * y_stride + first + at] = sums[i][j];
    }
  }
}
