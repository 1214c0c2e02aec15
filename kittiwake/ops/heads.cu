// What recurrences with a matrix state share: a column of it (one value channel) is held by 8 lanes of a warp, lane l has key
// channels 4 * (8 g + l) + e; sums over them end with the lanes 4, 2, 1 apart. Stands between base.cu and the kernels.
//
// D: channels of a head · DP: D rounded up to 32.

#define LANES 8
#define COLS (DP / LANES)
#define G (COLS / 4)
#define CHUNKS (DP / 32)

// The sum over the lanes of each of N columns, with fewer exchanges: lane l gets that of column l / (LANES / N).
template <int N>
__device__ __forceinline__ float scattered_sum(const float (&y)[N]) {
  const int lane = threadIdx.x % LANES;
  float x[N];
  #pragma unroll
  for (int j = 0; j < N; j++) x[j] = y[j];
  #pragma unroll
  for (int apart = LANES / 2, left = N; apart; apart >>= 1) {
    if (left > 1) {
      left >>= 1;
      const bool upper = lane & apart;
      #pragma unroll
      for (int j = 0; j < left; j++) {
        const float kept = upper ? x[j + left] : x[j], sent = upper ? x[j] : x[j + left];
        x[j] = kept + __shfl_xor_sync(~0u, sent, apart);
      }
    } else {
      x[0] += __shfl_xor_sync(~0u, x[0], apart);
    }
  }
  return x[0];
}

// Columns column .. column + N - 1 of a head's state [D key channels, D value channels], into or out of registers.
template <int N, bool STORE>
__device__ __forceinline__ void move_state(float (&s)[N][COLS], float* state, int column) {
  const int lane = threadIdx.x % LANES;
  #pragma unroll
  for (int c = 0; c < COLS; c++) {
    const int key = 4 * ((c / 4) * LANES + lane) + c % 4;
    float* from = state + (size_t)key * D + column;
    if (N == 4 && D % 4 == 0) {
      if (STORE) { if (key < D && column < D) *(float4*)from = make_float4(s[0][c], s[1 % N][c], s[2 % N][c], s[3 % N][c]); }
      else {
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (key < D && column < D) x = *(const float4*)from;
        s[0][c] = x.x; s[1 % N][c] = x.y; s[2 % N][c] = x.z; s[3 % N][c] = x.w;
      }
    } else {
      #pragma unroll
      for (int j = 0; j < N; j++) {
        const bool inside = key < D && column + j < D;
        if (STORE) { if (inside) from[j] = s[j][c]; }
        else s[j][c] = inside ? from[j] : 0.f;
      }
    }
  }
}

