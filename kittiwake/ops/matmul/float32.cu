// Products in float32: every sum is one chain of fused multiply-adds over K in order, whatever the tiling and the number of
// rows, as in the in-order kernel of triton.py (layers/cuda_probe.py proves it). Follows narrow.cu, compiled with DT 0.
//
// A block makes BM rows of BN columns, a thread TM of the rows and TN of the columns. Weights and rows are staged ahead
// through shared memory, BK of K in each of STAGES; the first stages of the weights are fetched before the kernel in front
// has ended: weights do not depend on it.

#define ROW (BK + 4)  // shared rows of 16 bytes more: eight that lie side by side meet in no bank
#define TX (BN / TN)
#define TY (BM / TM)

__device__ __forceinline__ void copy_16(unsigned to, const float* from, int bytes) {  // the rest of 16 bytes is zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void add_four(float& sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum); sum = fmaf(a.y, b.y, sum); sum = fmaf(a.z, b.z, sum); sum = fmaf(a.w, b.w, sum);
}

// lines: int64 [columns / 32, 6]: input, first column of x, first element of w, depth, first column of y, columns left.
extern "C" __global__ void __launch_bounds__(TX * TY) product_float32(
    const float* x, const float* w, float* y, const long long* lines, const int* activations, int rows, int x_stride,
    int x_group, int y_stride) {
  extern __shared__ __align__(16) float shared[];  // [STAGES, BN, ROW] weights, [STAGES, BM, ROW] rows
  constexpr int THREADS = TX * TY, PIECES = BK / 4;
  float* const rows_at = shared + STAGES * BN * ROW;
  const unsigned w_to = (unsigned)__cvta_generic_to_shared(shared), x_to = (unsigned)__cvta_generic_to_shared(rows_at);
  let_next_begin();
  const int column = blockIdx.x * BN, inner = BN < 32 ? column % 32 : 0, first_row = blockIdx.y * BM;
  const long long* line = lines + column / 32 * 6;
  const int depth = (int)line[3], w_stride = (depth + 15) / 16 * 16, steps = (depth + BK - 1) / BK;
  const float* w_from = w + line[2] + (size_t)inner * w_stride;
  const float* x_from = x + line[0] * x_group + line[1] + (size_t)first_row * x_stride;
  auto fetch_w = [&](int step) {
    if (step >= steps) return;
    #pragma unroll
    for (int i = threadIdx.x; i < BN * PIECES; i += THREADS) {
      const int row = i / PIECES, k = i % PIECES * 4;
      const int bytes = step * BK + k < w_stride ? 16 : 0;
      copy_16(w_to + ((step % STAGES * BN + row) * ROW + k) * 4, w_from + (size_t)row * w_stride + step * BK + k, bytes);
    }
  };
  auto fetch_x = [&](int step) {
    if (step >= steps) return;
    #pragma unroll
    for (int i = threadIdx.x; i < BM * PIECES; i += THREADS) {
      const int row = i / PIECES, k = i % PIECES * 4;
      const int bytes = first_row + row < rows && step * BK + k < depth ? 16 : 0;
      const float* from = bytes ? x_from + (size_t)row * x_stride + step * BK + k : x_from;
      copy_16(x_to + ((step % STAGES * BM + row) * ROW + k) * 4, from, bytes);
    }
  };
  for (int s = 0; s < STAGES - 1; s++) fetch_w(s);
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  for (int s = 0; s < STAGES - 1; s++) {
    fetch_x(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // a warp has 4 rows of threads and 8 columns of them; what a thread computes lies TY rows and TX columns apart
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tx = warp % (TX / 8) * 8 + lane % 8, ty = warp / (TX / 8) * 4 + lane / 8;
  float sums[TM][TN];
  #pragma unroll
  for (int i = 0; i < TM; i++)
    #pragma unroll
    for (int j = 0; j < TN; j++) sums[i][j] = 0.f;
  for (int step = 0; step < steps; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fetch_w(step + STAGES - 1);
    fetch_x(step + STAGES - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const float* b_at = shared + (step % STAGES * BN + tx) * ROW;
    const float* a_at = rows_at + (step % STAGES * BM + ty) * ROW;
    auto multiply = [&](int k) {
      float4 a[TM], b[TN];
      #pragma unroll
      for (int i = 0; i < TM; i++) a[i] = *(const float4*)(a_at + i * TY * ROW + k);
      #pragma unroll
      for (int j = 0; j < TN; j++) b[j] = *(const float4*)(b_at + j * TX * ROW + k);
      #pragma unroll
      for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) add_four(sums[i][j], a[i], b[j]);
    };
    const int left = depth - step * BK;
    if (left >= BK) {
      #pragma unroll
      for (int k = 0; k < BK; k += 4) multiply(k);
    } else {
      for (int k = 0; k < left; k += 4) multiply(k);
    }
  }
  #pragma unroll
  for (int i = 0; i < TM; i++) {
    #pragma unroll
    for (int j = 0; j < TN; j++) {
      const int row = first_row + ty + i * TY, at = tx + j * TX;
      if (row < rows && at < columns)
        y[(size_t)row * y_stride + first + at] = activation ? activated(sums[i][j], activation) : sums[i][j];
    }
  }
}
