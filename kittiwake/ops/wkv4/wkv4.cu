// WKV-4 on CUDA: the time mix between its products, one lane a channel, for prompts and for decoding.
//
// Equations: RWKV-LM, RWKV-v4/cuda/wkv_cuda.cu (kernel_forward). The readable twin is reference.py. Decoding's token is
// advance(); a prompt does the same operations on the same numbers, so their bits agree, but only what must wait for the
// token before does: the top, two operations a token, and then the two sums, one each. The rest, exponentials and all, is
// shared out. WARPS of a prompt's block, TOKENS of each at a time: they change no bit.

struct Sums { float num, den, top; };

// e^past and e^fresh, relative to the larger of the two, whose weight is 1: one exponential serves both.
__device__ __forceinline__ void weigh(float past, float fresh, float& past_weight, float& fresh_weight) {
  const float difference = past - fresh;
  const float smaller = expf(-fabsf(difference));
  past_weight = difference >= 0.f ? 1.f : smaller;
  fresh_weight = difference >= 0.f ? smaller : 1.f;
}

// n / d to within a unit in the last place, with no branch; d is a sum of weights, the largest of which is 1.
__device__ __forceinline__ float divide(float n, float d) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
  const float q = n * reciprocal;
  return fmaf(fmaf(-q, d, n), reciprocal, q);
}

// One token of one channel: r times the weighted mean of the past and v; then the past takes it in.
__device__ __forceinline__ float advance(Sums& s, float r, float k, float v, float log_decay, float bonus) {
  float past, fresh;
  weigh(s.top, bonus + k, past, fresh);
  const float y = r * divide(fmaf(past, s.num, fresh * v), fmaf(past, s.den, fresh));
  const float aged = s.top + log_decay;
  weigh(aged, k, past, fresh);
  s.num = fmaf(past, s.num, fresh * v);
  s.den = fmaf(past, s.den, fresh);
  s.top = fmaxf(aged, k);
  return y;
}

// Decoding: block (128 channels, sequence), one row a sequence. projected [B, r | k | v], r in [0, 1]; vectors [2, C] are
// log decay and bonus; num, den, top [S, C].
extern "C" __global__ void __launch_bounds__(128) decode(
    const elem* projected, const float* vectors, float* num, float* den, float* top, const int* slots, elem* out,
    int projected_stride, int out_stride, int width) {
  const int c = blockIdx.x * 128 + threadIdx.x, n = blockIdx.y;
  const bool inside = c < width;
  const size_t at = (size_t)slots[n] * width + c;
  Sums s = {0.f, 0.f, 0.f};
  float log_decay = 0.f, bonus = 0.f;
  if (inside) {  // nothing since the step before writes states
    s = {num[at], den[at], top[at]};
    log_decay = vectors[c]; bonus = vectors[width + c];
  }
  let_next_begin();
  wait_for_inputs();
  if (!inside) return;
  const elem* in = projected + (size_t)n * projected_stride + c;
  const float y = advance(s, widen(in[0]), widen(in[width]), widen(in[2 * width]), log_decay, bonus);
  out[(size_t)n * out_stride + c] = narrow(y);
  num[at] = s.num; den[at] = s.den; top[at] = s.top;
}

#define ROWS (WARPS * TOKENS)  // of a sequence, that a block takes at a time

// The sum (num or den) before each of so many rows, in place of what each adds to it; then the one after them.
__device__ __forceinline__ float add_up(float sum, const float (*aging)[32], float (*added)[32], int rows, int lane) {
  constexpr int BATCH = 16;
  int t = 0;
  for (; t + BATCH <= rows; t += BATCH) {
    float past[BATCH], fresh[BATCH];
    #pragma unroll
    for (int i = 0; i < BATCH; i++) { past[i] = aging[t + i][lane]; fresh[i] = added[t + i][lane]; }
    #pragma unroll
    for (int i = 0; i < BATCH; i++) { added[t + i][lane] = sum; sum = fmaf(past[i], sum, fresh[i]); }
  }
  for (; t < rows; t++) {
    const float fresh = added[t][lane];
    added[t][lane] = sum;
    sum = fmaf(aging[t][lane], sum, fresh);
  }
  return sum;
}

// Prompts: block (32 channels, sequence) walks its sequence, ROWS at a time, TOKENS of them a warp; one that is no longer
// than that a single warp walks token by token.
extern "C" __global__ void __launch_bounds__(WARPS * 32) scan(
    const elem* projected, const float* vectors, float* num, float* den,
    float* top, const int* starts, const int* slots, elem* out,
    int projected_stride, int out_stride, int width) {
  __shared__ float keys[ROWS][32], aging[ROWS][32], nums[ROWS][32], dens[ROWS][32], last_top[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.y;
  const bool inside = (int)blockIdx.x * 32 + lane < width;
  const int c = inside ? (int)blockIdx.x * 32 + lane : width - 1;  // lanes beyond do and store what the last channel's does
  const int first = starts[b], count = starts[b + 1] - first;
  const size_t at = (size_t)slots[b] * width + c;
  Sums s = {0.f, 0.f, 0.f};
  float log_decay = 0.f, bonus = 0.f;
  if (count > 0) {  // nothing since the step before writes states
    s = {num[at], den[at], top[at]};
    log_decay = vectors[c]; bonus = vectors[width + c];
  }
  wait_for_inputs();
  if (count <= 0 || (count <= TOKENS && (warp || !inside))) return;
  const elem* const from = projected + (size_t)first * projected_stride + c;
  elem* const to = out + (size_t)first * out_stride + c;
  elem coming[3][TOKENS];
  auto fetch = [&](int token) {
    #pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      const elem* in = from + (size_t)min(token + i, count - 1) * projected_stride;
      coming[0][i] = in[0]; coming[1][i] = in[width]; coming[2][i] = in[2 * width];
    }
  };
  fetch(warp * TOKENS);
  if (count <= TOKENS) {
    #pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      if (i >= count) break;
      const float y = advance(s, widen(coming[0][i]), widen(coming[1][i]), widen(coming[2][i]), log_decay, bonus);
      to[(size_t)i * out_stride] = narrow(y);
    }
    num[at] = s.num; den[at] = s.den; top[at] = s.top;
    return;
  }
  float sum = warp == 0 ? s.num : s.den;  // the first warp adds up numerators, the second denominators
  const int mine = warp * TOKENS;
  for (int begin = 0; begin < count; begin += ROWS) {
    float r[TOKENS], k[TOKENS], v[TOKENS];
    #pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      r[i] = widen(coming[0][i]); k[i] = widen(coming[1][i]); v[i] = widen(coming[2][i]);
      keys[mine + i][lane] = k[i];
    }
    if (begin + ROWS < count) fetch(begin + ROWS + mine);
    __syncthreads();
    float highest = s.top;
    #pragma unroll TOKENS
    for (int t = 0; t < mine; t++) highest = fmaxf(highest + log_decay, keys[t][lane]);
    float past[TOKENS], fresh[TOKENS];  // the weights of an output
    #pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      weigh(highest, bonus + k[i], past[i], fresh[i]);
      const float aged = highest + log_decay;
      float kept, added;  // the weights of what the next token finds
      weigh(aged, k[i], kept, added);
      aging[mine + i][lane] = kept;
      nums[mine + i][lane] = added * v[i];
      dens[mine + i][lane] = added;
      highest = fmaxf(aged, k[i]);
      if (begin + mine + i == count - 1) top[at] = highest;
    }
    if (warp == WARPS - 1) last_top[lane] = highest;
    __syncthreads();
    s.top = last_top[lane];
    if (warp < 2) sum = add_up(sum, aging, warp == 0 ? nums : dens, min(ROWS, count - begin), lane);
    __syncthreads();
    auto put = [&](int i) {
      const float n = nums[mine + i][lane], d = dens[mine + i][lane];
      const float y = r[i] * divide(fmaf(past[i], n, fresh[i] * v[i]), fmaf(past[i], d, fresh[i]));
      to[(size_t)(begin + mine + i) * out_stride] = narrow(y);
    };
    if (begin + mine + TOKENS <= count) {  // no branch between them
      #pragma unroll
      for (int i = 0; i < TOKENS; i++) put(i);
    } else {
      #pragma unroll
      for (int i = 0; i < TOKENS; i++)
        if (begin + mine + i < count) put(i);
    }
  }
  if (warp < 2) (warp == 0 ? num : den)[at] = sum;
}
