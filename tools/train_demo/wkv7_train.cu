// Training kernels for the RWKV-7 time-mix scan, head size 64, bf16 in and out, float32 state.
//
// Per sequence and head, with S the [value i][key j] state, zero at the start of a sequence:
//
//   sa_t = S_{t-1} a_t            S_t = S_{t-1} diag(w_t) + sa_t b_t^T + v_t k_t^T            y_t = S_t r_t
//
// where w_t = exp(-0.606531 * sigmoid(wraw_t)); the caller passes wraw, a = -kk and b = kk * gate.
//
// All tensors are [sequence][time][head][64]. One thread block walks one (sequence, head); P neighbouring threads share
// one row (and, going backward, one column) of the state, so that a block has 64 * P threads. Thread part p of P holds
// the float4 groups p, p + P, p + 2P ... of its row: neighbouring threads then read neighbouring float4s of shared memory.
//
// The forward pass keeps S at the end of every 16th step and every sa. The backward pass walks from the end, reloads S
// at those steps and between them undoes one step at a time: S_{t-1} = (S_t - sa_t b_t^T - v_t k_t^T) / w_t. As w is
// above 0.545 the undo loses at most a factor 2e4 of float32's precision over 16 steps, on entries that have decayed.
//
// Built into a plain shared library and called through ctypes:
//   nvcc -O3 -arch=sm_90 -shared -Xcompiler -fPIC -o libwkv7.so wkv7_train.cu

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

using bf16 = __nv_bfloat16;

constexpr int kHead = 64;       // head size
constexpr int kChunk = 16;      // steps between two kept states
constexpr float kDecay = 0.606531f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

template <int P>
__device__ __forceinline__ float sum_parts(float x) {
#pragma unroll
  for (int offset = 1; offset < P; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float dot4(float4 x, float4 y) { return (x.x * y.x + x.y * y.y) + (x.z * y.z + x.w * y.w); }

__device__ __forceinline__ void add_scaled(float4& x, float s, float4 y) {
  x.x += s * y.x;
  x.y += s * y.y;
  x.z += s * y.z;
  x.w += s * y.w;
}

// x * w + s * y + u * z, element by element.
__device__ __forceinline__ float4 step_state(float4 x, float4 w, float s, float4 y, float u, float4 z) {
  return make_float4(x.x * w.x + (s * y.x + u * z.x), x.y * w.y + (s * y.y + u * z.y), x.z * w.z + (s * y.z + u * z.z),
                     x.w * w.w + (s * y.w + u * z.w));
}

// Inputs of one step, in this order in shared memory.
enum { kR, kW, kK, kV, kA, kB, kForwardInputs, kDy = kForwardInputs, kBackwardInputs };

template <int P>
__global__ void __launch_bounds__(kHead* P)
    wkv7_forward(int steps, int heads, const bf16* __restrict__ r, const bf16* __restrict__ w,
                 const bf16* __restrict__ k, const bf16* __restrict__ v, const bf16* __restrict__ a,
                 const bf16* __restrict__ b, bf16* __restrict__ y, float* __restrict__ states,
                 float* __restrict__ sa_out) {
  constexpr int kThreads = kHead * P;
  constexpr int kGroups = kHead / 4 / P;
  constexpr int kInputs = kForwardInputs * kHead;
  constexpr int kLoads = (kInputs + kThreads - 1) / kThreads;
  __shared__ float4 shared[2][kForwardInputs][kHead / 4];

  const int thread = threadIdx.x, row = thread / P, part = thread % P;
  const size_t stride = static_cast<size_t>(heads) * kHead;
  const size_t base = (static_cast<size_t>(blockIdx.x / heads) * steps * heads + blockIdx.x % heads) * kHead;
  float* kept = states ? states + static_cast<size_t>(blockIdx.x) * (steps / kChunk) * kHead * kHead : nullptr;

  const bf16* inputs[kForwardInputs] = {r, w, k, v, a, b};
  const bf16* source[kLoads];
  bf16 next[kLoads];
#pragma unroll
  for (int l = 0; l < kLoads; l++) {
    const int e = l * kThreads + thread;
    source[l] = inputs[0];
#pragma unroll
    for (int n = 0; n < kForwardInputs; n++)
      if (e / kHead == n) source[l] = inputs[n];
    source[l] += base + e % kHead;
    if (e < kInputs) next[l] = *source[l];
  }

  float4 S[kGroups];
#pragma unroll
  for (int q = 0; q < kGroups; q++) S[q] = make_float4(0.f, 0.f, 0.f, 0.f);

  for (int t = 0; t < steps; t++) {
    float4(*in)[kHead / 4] = shared[t & 1];
    float* flat = reinterpret_cast<float*>(in);
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
      const int e = l * kThreads + thread;
      if (e < kInputs) {
        float x = __bfloat162float(next[l]);
        if (e / kHead == kW) x = __expf(-kDecay * sigmoid(x));
        flat[e] = x;
        if (t + 1 < steps) next[l] = source[l][(t + 1) * stride];
      }
    }
    __syncthreads();

    float sa = 0.f;
#pragma unroll
    for (int q = 0; q < kGroups; q++) sa += dot4(S[q], in[kA][q * P + part]);
    sa = sum_parts<P>(sa);
    const float v_row = flat[kV * kHead + row];
    float out = 0.f;
#pragma unroll
    for (int q = 0; q < kGroups; q++) {
      const int g = q * P + part;
      S[q] = step_state(S[q], in[kW][g], sa, in[kB][g], v_row, in[kK][g]);
      out += dot4(S[q], in[kR][g]);
    }
    out = sum_parts<P>(out);
    if (part == 0) {
      y[base + t * stride + row] = __float2bfloat16(out);
      if (sa_out) sa_out[base + t * stride + row] = sa;
    }
    if (kept && t % kChunk == kChunk - 1) {
      float4* to = reinterpret_cast<float4*>(kept + static_cast<size_t>(t / kChunk) * kHead * kHead + row * kHead);
#pragma unroll
      for (int q = 0; q < kGroups; q++) to[q * P + part] = S[q];
    }
  }
}

template <int P>
__global__ void __launch_bounds__(kHead* P, P == 1 ? 4 : P == 2 ? 4 : 2)
    wkv7_backward(int steps, int heads, const bf16* __restrict__ r, const bf16* __restrict__ w,
                  const bf16* __restrict__ k, const bf16* __restrict__ v, const bf16* __restrict__ a,
                  const bf16* __restrict__ b, const bf16* __restrict__ dy, const float* __restrict__ states,
                  const float* __restrict__ sa_in, bf16* __restrict__ dr, bf16* __restrict__ dw, bf16* __restrict__ dk,
                  bf16* __restrict__ dv, bf16* __restrict__ da, bf16* __restrict__ db) {
  constexpr int kThreads = kHead * P;
  constexpr int kGroups = kHead / 4 / P;
  constexpr int kInputs = kBackwardInputs * kHead;
  constexpr int kLoads = (kInputs + kThreads - 1) / kThreads;
  __shared__ float4 shared[2][kBackwardInputs][kHead / 4];
  __shared__ float4 shared_sa[2][kHead / 4];
  __shared__ float shared_factor[2][kHead];  // d w / d wraw
  __shared__ float4 shared_dsa[kHead / 4];

  // `own` is both the row i of the row-wise work and the column j of the column-wise work.
  const int thread = threadIdx.x, own = thread / P, part = thread % P;
  const size_t stride = static_cast<size_t>(heads) * kHead;
  const size_t base = (static_cast<size_t>(blockIdx.x / heads) * steps * heads + blockIdx.x % heads) * kHead;
  const float* kept = states + static_cast<size_t>(blockIdx.x) * (steps / kChunk) * kHead * kHead;

  const bf16* inputs[kBackwardInputs] = {r, w, k, v, a, b, dy};
  const bf16* source[kLoads];
  bf16 next[kLoads];
  float next_sa = 0.f;
  const size_t last = (steps - 1) * stride;
#pragma unroll
  for (int l = 0; l < kLoads; l++) {
    const int e = l * kThreads + thread;
    source[l] = inputs[0];
#pragma unroll
    for (int n = 0; n < kBackwardInputs; n++)
      if (e / kHead == n) source[l] = inputs[n];
    source[l] += base + e % kHead;
    if (e < kInputs) next[l] = source[l][last];
  }
  if (thread < kHead) next_sa = sa_in[base + last + thread];

  float4 S[kGroups];   // S_t, column `own`: S[i][own]
  float4 Dc[kGroups];  // gradient of S, column `own`
  float4 Dr[kGroups];  // gradient of S, row `own`
#pragma unroll
  for (int q = 0; q < kGroups; q++) S[q] = Dc[q] = Dr[q] = make_float4(0.f, 0.f, 0.f, 0.f);

  for (int t = steps - 1; t >= 0; t--) {
    float4(*in)[kHead / 4] = shared[t & 1];
    float* flat = reinterpret_cast<float*>(in);
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
      const int e = l * kThreads + thread;
      if (e < kInputs) {
        float x = __bfloat162float(next[l]);
        if (e / kHead == kW) {
          const float s = sigmoid(x);
          x = __expf(-kDecay * s);
          shared_factor[t & 1][e % kHead] = -kDecay * x * s * (1.f - s);
        }
        flat[e] = x;
        if (t > 0) next[l] = source[l][(t - 1) * stride];
      }
    }
    if (thread < kHead) {
      reinterpret_cast<float*>(shared_sa[t & 1])[thread] = next_sa;
      if (t > 0) next_sa = sa_in[base + (t - 1) * stride + thread];
    }
    if (t % kChunk == kChunk - 1) {
      const float* from = kept + static_cast<size_t>(t / kChunk) * kHead * kHead + own;
#pragma unroll
      for (int q = 0; q < kGroups; q++) {
        const float* at = from + 4 * (q * P + part) * kHead;
        S[q] = make_float4(at[0], at[kHead], at[2 * kHead], at[3 * kHead]);
      }
    }
    __syncthreads();

    // Row-wise: dS += dy r^T; dv = dS k; dsa = dS b; then dS_{t-1} = dS diag(w) + dsa a^T.
    const float dy_own = flat[kDy * kHead + own];
    float dv_sum = 0.f, dsa = 0.f;
#pragma unroll
    for (int q = 0; q < kGroups; q++) {
      const int g = q * P + part;
      add_scaled(Dr[q], dy_own, in[kR][g]);
      dv_sum += dot4(Dr[q], in[kK][g]);
      dsa += dot4(Dr[q], in[kB][g]);
    }
    dv_sum = sum_parts<P>(dv_sum);
    dsa = sum_parts<P>(dsa);
    if (part == 0) reinterpret_cast<float*>(shared_dsa)[own] = dsa;
#pragma unroll
    for (int q = 0; q < kGroups; q++) {
      const float4 wq = in[kW][q * P + part], aq = in[kA][q * P + part];
      Dr[q] = make_float4(Dr[q].x * wq.x + dsa * aq.x, Dr[q].y * wq.y + dsa * aq.y, Dr[q].z * wq.z + dsa * aq.z,
                          Dr[q].w * wq.w + dsa * aq.w);
    }

    // Column-wise, before dsa is known: dr = S^T dy; undo the step; dk = dS^T v; db = dS^T sa; dw = sum_i dS S_{t-1}.
    const float r_own = flat[kR * kHead + own], w_own = flat[kW * kHead + own], k_own = flat[kK * kHead + own];
    const float b_own = flat[kB * kHead + own], a_own = flat[kA * kHead + own];
    const float w_inverse = __frcp_rn(w_own);
    float dr_sum = 0.f, dk_sum = 0.f, db_sum = 0.f, dw_sum = 0.f, da_sum = 0.f;
#pragma unroll
    for (int q = 0; q < kGroups; q++) {
      const int g = q * P + part;
      const float4 dyq = in[kDy][g], vq = in[kV][g], saq = shared_sa[t & 1][g];
      dr_sum += dot4(S[q], dyq);
      S[q].x = (S[q].x - saq.x * b_own - vq.x * k_own) * w_inverse;
      S[q].y = (S[q].y - saq.y * b_own - vq.y * k_own) * w_inverse;
      S[q].z = (S[q].z - saq.z * b_own - vq.z * k_own) * w_inverse;
      S[q].w = (S[q].w - saq.w * b_own - vq.w * k_own) * w_inverse;
      add_scaled(Dc[q], r_own, dyq);
      dk_sum += dot4(Dc[q], vq);
      db_sum += dot4(Dc[q], saq);
      dw_sum += dot4(Dc[q], S[q]);
    }
    __syncthreads();
    // Now with dsa: da = S_{t-1}^T dsa; dS_{t-1} column.
#pragma unroll
    for (int q = 0; q < kGroups; q++) {
      const float4 dsaq = shared_dsa[q * P + part];
      da_sum += dot4(S[q], dsaq);
      Dc[q] = make_float4(Dc[q].x * w_own + dsaq.x * a_own, Dc[q].y * w_own + dsaq.y * a_own,
                          Dc[q].z * w_own + dsaq.z * a_own, Dc[q].w * w_own + dsaq.w * a_own);
    }
    dr_sum = sum_parts<P>(dr_sum);
    dk_sum = sum_parts<P>(dk_sum);
    db_sum = sum_parts<P>(db_sum);
    dw_sum = sum_parts<P>(dw_sum);
    da_sum = sum_parts<P>(da_sum);
    if (part == 0) {
      const size_t at = base + t * stride + own;
      dr[at] = __float2bfloat16(dr_sum);
      dw[at] = __float2bfloat16(dw_sum * shared_factor[t & 1][own]);
      dk[at] = __float2bfloat16(dk_sum);
      dv[at] = __float2bfloat16(dv_sum);
      da[at] = __float2bfloat16(da_sum);
      db[at] = __float2bfloat16(db_sum);
    }
  }
}

}  // namespace

// Both return a cudaError_t (0: success), -1 for arguments that are not supported. `parts` is P: 1, 2 or 4.
extern "C" int wkv7_train_forward(int sequences, int steps, int heads, int parts, const void* r, const void* w,
                                  const void* k, const void* v, const void* a, const void* b, void* y, void* states,
                                  void* sa, void* stream) {
  if (sequences < 1 || steps < 1 || steps % kChunk || heads < 1) return -1;
#define LAUNCH(P)                                                                                                \
  wkv7_forward<P><<<sequences * heads, kHead * P, 0, static_cast<cudaStream_t>(stream)>>>(                       \
      steps, heads, static_cast<const bf16*>(r), static_cast<const bf16*>(w), static_cast<const bf16*>(k),       \
      static_cast<const bf16*>(v), static_cast<const bf16*>(a), static_cast<const bf16*>(b), static_cast<bf16*>(y), \
      static_cast<float*>(states), static_cast<float*>(sa))
  if (parts == 1) LAUNCH(1);
  else if (parts == 2) LAUNCH(2);
  else if (parts == 4) LAUNCH(4);
  else return -1;
#undef LAUNCH
  return static_cast<int>(cudaGetLastError());
}

extern "C" int wkv7_train_backward(int sequences, int steps, int heads, int parts, const void* r, const void* w,
                                   const void* k, const void* v, const void* a, const void* b, const void* dy,
                                   const void* states, const void* sa, void* dr, void* dw, void* dk, void* dv, void* da,
                                   void* db, void* stream) {
  if (sequences < 1 || steps < 1 || steps % kChunk || heads < 1) return -1;
#define LAUNCH(P)                                                                                               \
  wkv7_backward<P><<<sequences * heads, kHead * P, 0, static_cast<cudaStream_t>(stream)>>>(                     \
      steps, heads, static_cast<const bf16*>(r), static_cast<const bf16*>(w), static_cast<const bf16*>(k),      \
      static_cast<const bf16*>(v), static_cast<const bf16*>(a), static_cast<const bf16*>(b),                    \
      static_cast<const bf16*>(dy), static_cast<const float*>(states), static_cast<const float*>(sa),           \
      static_cast<bf16*>(dr), static_cast<bf16*>(dw), static_cast<bf16*>(dk), static_cast<bf16*>(dv),           \
      static_cast<bf16*>(da), static_cast<bf16*>(db))
  if (parts == 1) LAUNCH(1);
  else if (parts == 2) LAUNCH(2);
  else if (parts == 4) LAUNCH(4);
  else return -1;
#undef LAUNCH
  return static_cast<int>(cudaGetLastError());
}
