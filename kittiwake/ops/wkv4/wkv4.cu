// WKV-4 on CUDA: the time mix between its products, one thread a channel, for prompts and for decoding.
//
// Equations: RWKV-LM, RWKV-v4/cuda/wkv_cuda.cu (kernel_forward). The readable twin is reference.py. Both kernels take a
// token by the same function, so their bits agree; a state stays in its thread's registers for as long as its sequence
// has rows. AHEAD: tokens whose inputs are on their way while as many are worked on; it changes no bit.

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

// Prompts: block (32 channels, sequence) walks its sequence token by token.
extern "C" __global__ void __launch_bounds__(32) scan(
    const elem* projected, const float* vectors, float* num, float* den,
    float* top, const int* starts, const int* slots, elem* out,
    int projected_stride, int out_stride, int width) {
  const int c = blockIdx.x * 32 + threadIdx.x, b = blockIdx.y;
  const int first = starts[b], count = starts[b + 1] - first;
  const bool works = c < width && count > 0;
  const size_t at = (size_t)slots[b] * width + c;
  Sums s = {0.f, 0.f, 0.f};
  float log_decay = 0.f, bonus = 0.f;
  if (works) {
    s = {num[at], den[at], top[at]};
    log_decay = vectors[c]; bonus = vectors[width + c];
  }
  let_next_begin();
  wait_for_inputs();
  if (!works) return;
  const elem* from = projected + (size_t)first * projected_stride + c;
  elem* to = out + (size_t)first * out_stride + c;
  elem coming[3][AHEAD];
  auto fetch = [&](int token) {
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const elem* in = from + (size_t)min(token + i, count - 1) * projected_stride;
      coming[0][i] = in[0]; coming[1][i] = in[width]; coming[2][i] = in[2 * width];
    }
  };
  fetch(0);
  for (int token = 0; token < count; token += AHEAD) {
    float r[AHEAD], k[AHEAD], v[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) { r[i] = widen(coming[0][i]); k[i] = widen(coming[1][i]); v[i] = widen(coming[2][i]); }
    if (token + AHEAD < count) fetch(token + AHEAD);
    if (token + AHEAD <= count) {
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        *to = narrow(advance(s, r[i], k[i], v[i], log_decay, bonus));
        to += out_stride;
      }
    } else {
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (token + i < count) {
          *to = narrow(advance(s, r[i], k[i], v[i], log_decay, bonus));
          to += out_stride;
        }
      }
    }
  }
  num[at] = s.num; den[at] = s.den; top[at] = s.top;
}
