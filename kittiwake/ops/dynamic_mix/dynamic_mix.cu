// The second half of RWKV-6's token shift on CUDA, with the low-rank products that it needs inside, for few rows: one launch
// for two. To be compiled behind base.cu.
//
// A warp makes 8 channels of every mix of ROWS rows. Its weights and mixes come into registers before the kernel in front has
// ended; then all that is read of a row is asked for at once. A product walks its depth in order, m16n8k16 by m16n8k16, and is
// rounded as ops/matmul/narrow.cu rounds it; the rest is the arithmetic of close_kernel in triton.py, which contracts nothing.
//
// DT: 1 float16, 2 bfloat16 · MIXES · RANK: depth of a product, a multiple of 8 · ROWS: 8 or 16 · WARPS: of a block.

#define STEPS ((RANK + 15) / 16)  // of 16 of the depth
#define HALVES (ROWS / 8)

// kept float32 [2, N, width]: normed rows, and their differences to the rows before · down [N, MIXES * RANK] · up [MIXES,
// width or more, STEPS * 16] · mixes float32 [MIXES, width] · mixed [MIXES, N, width], written. width is a multiple of 8.
extern "C" __global__ void __launch_bounds__(WARPS * 32) close_low(
    const float* kept, const elem* down, const elem* up, const float* mixes, elem* mixed, int rows, int width, int kept_stride,
    int down_stride, int up_stride, int mixed_stride, int begin_next) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * 8;
  const int pair = lane % 4 * 2, column = first + pair;  // the lane's two of K, and its two channels
  unsigned w[MIXES][STEPS][2];
  float2 mix[MIXES];
  if (begin_next) let_next_begin();
  if (first < width) {
    #pragma unroll
    for (int m = 0; m < MIXES; m++) {
      const elem* from = up + (size_t)m * up_stride + (size_t)(first + lane / 4) * (STEPS * 16) + pair;
      #pragma unroll
      for (int i = 0; i < STEPS * 2; i++) w[m][i / 2][i % 2] = *(const unsigned*)(from + i * 8);
      mix[m] = *(const float2*)(mixes + (size_t)m * width + column);
    }
  }
  wait_for_inputs();
  if (first >= width) return;
  for (int top = blockIdx.y * ROWS; top < rows; top += gridDim.y * ROWS) {
    float2 normed[HALVES], gap[HALVES];
    unsigned a[MIXES][STEPS][2][HALVES];
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const int row = top + half * 8 + lane / 4;
      const bool is_there = row < rows;
      const float* at = kept + (size_t)row * width + column;
      normed[half].x = normed[half].y = gap[half].x = gap[half].y = 0.f;
      if (is_there) { normed[half] = *(const float2*)at; gap[half] = *(const float2*)(at + kept_stride); }
      #pragma unroll
      for (int m = 0; m < MIXES; m++) {
        const elem* x = down + (size_t)row * down_stride + m * RANK + pair;
        #pragma unroll
        for (int i = 0; i < STEPS * 2; i++) a[m][i / 2][i % 2][half] = is_there && i * 8 < RANK ? *(const unsigned*)(x + i * 8) : 0;
      }
    }
    float c[MIXES][4];
    #pragma unroll
    for (int m = 0; m < MIXES; m++) {
      c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
      #pragma unroll
      for (int s = 0; s < STEPS; s++)
        add_products(c[m], a[m][s][0][0], HALVES == 2 ? a[m][s][0][HALVES - 1] : 0, a[m][s][1][0],
                     HALVES == 2 ? a[m][s][1][HALVES - 1] : 0, w[m][s][0], w[m][s][1]);
    }
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const int row = top + half * 8 + lane / 4;
      elem* to = mixed + (size_t)row * width + column;
      unsigned made[MIXES];
      #pragma unroll
      for (int m = 0; m < MIXES; m++) {
        const elem x = round_only(normed[half].x + gap[half].x * (mix[m].x + widen(round_only(c[m][half * 2]))));
        const elem y = round_only(normed[half].y + gap[half].y * (mix[m].y + widen(round_only(c[m][half * 2 + 1]))));
        made[m] = x | (unsigned)y << 16;
      }
      if (row >= rows) continue;
      #pragma unroll
      for (int m = 0; m < MIXES; m++) *(unsigned*)(to + (size_t)m * mixed_stride) = made[m];
    }
  }
}
