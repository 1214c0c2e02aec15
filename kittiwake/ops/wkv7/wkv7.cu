// WKV-7 on CUDA: the time mix between its products, for prompts in three launches and for decoding in one.
//
// Equations: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py (time_mixing); arXiv 2503.14456. The readable twin is reference.py.
//
// One arithmetic serves all: a row of the state (one value channel) is held by 8 lanes of a warp, lane l has key channels
// 4 * (8 g + l) + e. Its two sums over key channels run over g in order for each e, then (0 + 1) + (2 + 3), then over the
// lanes 4, 2, 1 apart. Which rows share a thread or a block changes nothing. Sums over a head's channels are taken 32
// channels at a time by a warp, 16, 8, 4, 2, 1 apart, and those sums added in order.
//
// D: channels of a head · DP: D rounded up to 32 · DT: see base.cu · R, ROWS, STEPS,
// STAGES: see heads.cu, whose columns are the rows here.

enum { P_W, P_K, P_A, P_B, P_R, P_V, P_COUNT };  // the vectors of one token and head, [P_COUNT, DP] float32
enum { V_W0, V_A0, V_V0, V_KK, V_KA, V_RK, V_NORM_WEIGHT, V_NORM_BIAS };  // rows of a layer's vectors [8, C]

__device__ __forceinline__ float lanes_sum(float x) {
  #pragma unroll
  for (int apart = LANES / 2; apart; apart >>= 1) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

// What the products of a row give, and what a layer knows. Columns of `projected`: r, k, v. Of `low`: decay, in-context
// learning rate, gate, value residual.
struct Inputs {
  const elem* projected; const elem* low; elem* v_first; const float* vectors;
  int projected_stride, low_stride, width, first_layer;
};

// What a layer knows of a head's channels, and the gates of a row: lane l of a warp has channels l + 32 i.
struct Known {
  float w0[CHUNKS], a0[CHUNKS], v0[CHUNKS], kk[CHUNKS], ka[CHUNKS], rk[CHUNKS], weight[CHUNKS], bias[CHUNKS];
  __device__ __forceinline__ void load(const float* vectors, int C, int h) {
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int d = threadIdx.x % 32 + 32 * i;
      const float* v = vectors + h * D + d;
      const bool inside = d < D;
      w0[i] = inside ? v[V_W0 * C] : 0.f; a0[i] = inside ? v[V_A0 * C] : 0.f; v0[i] = inside ? v[V_V0 * C] : 0.f;
      kk[i] = inside ? v[V_KK * C] : 0.f; ka[i] = inside ? v[V_KA * C] : 0.f; rk[i] = inside ? v[V_RK * C] : 0.f;
      weight[i] = inside ? v[V_NORM_WEIGHT * C] : 0.f; bias[i] = inside ? v[V_NORM_BIAS * C] : 0.f;
    }
  }
};
// The low-rank products of a row and head, channel d: from memory, or from shared memory where this block made them.
enum { L_DECAY, L_RATE, L_GATE, L_RESIDUAL, L_COUNT };
struct LowInMemory {
  const elem* at; int width;
  __device__ __forceinline__ LowInMemory(const Inputs& in, int n, int h) : at(in.low + (size_t)n * in.low_stride + h * D), width(in.width) {}
  __device__ __forceinline__ float operator()(int which, int d) const { return widen(at[which * width + d]); }
};
struct LowInBlock {
  const float* at;  // [L_COUNT, DP]
  __device__ __forceinline__ float operator()(int which, int d) const { return at[which * DP + d]; }
};
template <class Low>
__device__ __forceinline__ void load_gates(const Low& low, float (&gate)[CHUNKS]) {
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = threadIdx.x % 32 + 32 * i;
    gate[i] = d < D ? low(L_GATE, d) : 0.f;
  }
}

// The products of a row and head, and the first layer's value, of which this one's takes a share.
struct Raw : Products {
  float earlier[CHUNKS];
  __device__ __forceinline__ void load(const Inputs& in, int n, int h) {
    const elem* projected = in.projected + (size_t)n * in.projected_stride + h * D;
    const elem* first = in.v_first + (size_t)n * in.width + h * D;
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int d = threadIdx.x % 32 + 32 * i;
      Products::load(projected, in.width, i);
      earlier[i] = d < D && !in.first_layer ? widen(first[d]) : 0.f;
    }
  }
};

// A warp makes the six vectors of row n and head h in `out` [P_COUNT, DP].
template <class Low>
__device__ __forceinline__ void prepare_head(
    const Inputs& in, const Raw& raw, const Low& low, const Known& known, int n, int h, float* out) {
  const int lane = threadIdx.x % 32;
  elem* first = in.v_first + (size_t)n * in.width + h * D;
  float w[CHUNKS], k[CHUNKS], v[CHUNKS], rate[CHUNKS], residual[CHUNKS], kk[CHUNKS], norm = 0.f;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {  // all loads before the first use
    const int d = lane + 32 * i;
    const bool inside = d < D;
    k[i] = raw.k[i]; v[i] = raw.v[i];
    w[i] = inside ? low(L_DECAY, d) : 0.f; rate[i] = inside ? low(L_RATE, d) : 0.f;
    residual[i] = inside && !in.first_layer ? low(L_RESIDUAL, d) : 0.f;
  }
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    w[i] = expf(-0.6065306597126334f * sigmoid(known.w0[i] + w[i]));
    rate[i] = sigmoid(known.a0[i] + rate[i]);
    if (!in.first_layer) v[i] = fmaf(raw.earlier[i] - v[i], sigmoid(known.v0[i] + residual[i]), v[i]);
    else if (d < D) first[d] = narrow(v[i]);
    kk[i] = k[i] * known.kk[i];
    k[i] = k[i] * fmaf(rate[i] - 1.f, known.ka[i], 1.f);
    out[P_W * DP + d] = d < D ? w[i] : 0.f;
    out[P_K * DP + d] = k[i]; out[P_R * DP + d] = raw.r[i]; out[P_V * DP + d] = v[i];
    norm += warp_sum(kk[i] * kk[i]);
  }
  norm = fmaxf(sqrtf(norm), 1e-12f);
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    const float unit = kk[i] / norm;
    out[P_A * DP + d] = -unit; out[P_B * DP + d] = unit * rate[i];
  }
}

// A warp turns y [DP] of a row and head into what the output product eats: group norm, bonus, gate; `to` is the head's.
__device__ __forceinline__ void finish_head(
    const Known& known, const float (&gate)[CHUNKS], const float* made, const float* y, elem* to, float eps) {
  const int lane = threadIdx.x % 32;
  float x[CHUNKS], sum = 0.f, bonus = 0.f;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    x[i] = d < D ? y[d] : 0.f;
    sum += warp_sum(x[i]);
    bonus += warp_sum(made[P_R * DP + d] * made[P_K * DP + d] * known.rk[i]);
  }
  const float scale = centred(x, sum / D, eps);
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    const float normed = fmaf(x[i] * scale, known.weight[i], known.bias[i]);
    if (d < D) to[d] = narrow(fmaf(bonus, made[P_V * DP + d], normed) * gate[i]);
  }
}

// The vectors of one token, as a thread needs them: its key channels, and the value channels of its N state rows.
template <int N>
struct Vectors {
  float4 w[G], k[G], a[G], b[G], r[G];
  float v[N];
  __device__ __forceinline__ void load(const float* made, int row) {  // made [P_COUNT, DP]
    const float4* m = (const float4*)made + threadIdx.x % LANES;
    #pragma unroll
    for (int g = 0; g < G; g++) a[g] = m[P_A * (DP / 4) + g * LANES];
    #pragma unroll
    for (int g = 0; g < G; g++) {
      w[g] = m[P_W * (DP / 4) + g * LANES]; k[g] = m[P_K * (DP / 4) + g * LANES];
      b[g] = m[P_B * (DP / 4) + g * LANES]; r[g] = m[P_R * (DP / 4) + g * LANES];
    }
    #pragma unroll
    for (int j = 0; j < N; j++) v[j] = made[P_V * DP + row + j];
  }
};

// One token on N rows of the state that a thread holds, s[row][key channel]; y: this lane's share of each row's output.
template <int N>
__device__ __forceinline__ void advance(float (&s)[N][COLS], const Vectors<N>& m, float (&y)[N]) {
  float removed[N];
  #pragma unroll
  for (int j = 0; j < N; j++) {
    float p0 = 0.f, p1 = 0.f, p2 = 0.f, p3 = 0.f;
    #pragma unroll
    for (int g = 0; g < G; g++) {
      const float* t = &s[j][4 * g];
      p0 = fmaf(t[0], m.a[g].x, p0); p1 = fmaf(t[1], m.a[g].y, p1);
      p2 = fmaf(t[2], m.a[g].z, p2); p3 = fmaf(t[3], m.a[g].w, p3);
    }
    removed[j] = lanes_sum((p0 + p1) + (p2 + p3));
  }
  #pragma unroll
  for (int j = 0; j < N; j++) {
    float p0 = 0.f, p1 = 0.f, p2 = 0.f, p3 = 0.f;
    #pragma unroll
    for (int g = 0; g < G; g++) {
      float* t = &s[j][4 * g];
      const float4 w = m.w[g], k = m.k[g], b = m.b[g], r = m.r[g];
      t[0] = fmaf(t[0], w.x, fmaf(removed[j], b.x, m.v[j] * k.x)); t[1] = fmaf(t[1], w.y, fmaf(removed[j], b.y, m.v[j] * k.y));
      t[2] = fmaf(t[2], w.z, fmaf(removed[j], b.z, m.v[j] * k.z)); t[3] = fmaf(t[3], w.w, fmaf(removed[j], b.w, m.v[j] * k.w));
      p0 = fmaf(t[0], r.x, p0); p1 = fmaf(t[1], r.y, p1); p2 = fmaf(t[2], r.z, p2); p3 = fmaf(t[3], r.w, p3);
    }
    y[j] = (p0 + p1) + (p2 + p3);
  }
}

// The token of block (head h, sequence n), once its state is in registers and its low-rank products are known; `raw` is the
// first warp's.
template <class Low>
__device__ __forceinline__ void decode_head(
    const Inputs& in, const Raw& raw, const Low& low, const Known& known, float (&s)[4][COLS], float* state, int n, int h,
    elem* out, float eps, int begin_next, float* made, float* y_all) {
  const int row = threadIdx.x / LANES * 4;
  float gate[CHUNKS];
  if (threadIdx.x < 32) {
    load_gates(low, gate);
    prepare_head(in, raw, low, known, n, h, made);
  }
  __syncthreads();
  float y[4];
  Vectors<4> m;
  m.load(made, row);
  advance<4>(s, m, y);
  const float sum = scattered_sum<4>(y);
  if (threadIdx.x % (LANES / 4) == 0) y_all[row + threadIdx.x % LANES / (LANES / 4)] = sum;
  move_state<4, true>(s, state, row);
  __syncthreads();
  if (begin_next == 2) let_next_begin();
  if (threadIdx.x < 32) finish_head(known, gate, made, y_all, out + (size_t)n * in.width + h * D, eps);
}

// Decoding: block (head, sequence), one row a sequence; 2 * DP threads of 4 state rows each.
extern "C" __global__ void __launch_bounds__(2 * DP) decode(
    const elem* projected, const elem* low, elem* v_first, const float* vectors, float* state, const int* slots, elem* out,
    int projected_stride, int low_stride, int width, int first_layer, float eps, int begin_next) {
  __shared__ __align__(16) float made[P_COUNT * DP];
  __shared__ float y_all[DP];
  const int h = blockIdx.x, n = blockIdx.y, heads = gridDim.x;
  const Inputs in = {projected, low, v_first, vectors, projected_stride, low_stride, width, first_layer};
  float* mine = state + ((size_t)slots[n] * heads + h) * D * D;
  float s[4][COLS];
  Known known;
  if (begin_next == 1) let_next_begin();
  move_state<4, false>(s, mine, threadIdx.x / LANES * 4);  // nothing since the step before writes states
  if (threadIdx.x < 32) known.load(vectors, width, h);
  wait_for_inputs();
  Raw raw;
  if (threadIdx.x < 32) raw.load(in, n, h);
  decode_head(in, raw, LowInMemory(in, n, h), known, s, mine, n, h, out, eps, begin_next, made, y_all);
}

#if DT != 0 && D % 32 == 0 && defined(LOW_DEPTHS)
// The same with the low-rank products inside, for few sequences. lines: that group's table, [columns / 32, 6] int64, in the
// order of L_DECAY to L_RESIDUAL, the last of which the first layer lacks.
extern "C" __global__ void __launch_bounds__(2 * DP) decode_low(
    const elem* projected, const elem* up, elem* v_first, const float* vectors, float* state, const int* slots, elem* out,
    const long long* lines, int projected_stride, int width, int first_layer, float eps, int begin_next) {
  extern __shared__ __align__(16) elem room[];
  __shared__ __align__(16) float made[P_COUNT * DP];
  __shared__ float y_all[DP], low[L_COUNT * DP];
  const int h = blockIdx.x, n = blockIdx.y, heads = gridDim.x, warp = threadIdx.x / 32;
  const Inputs in = {projected, 0, v_first, vectors, projected_stride, 0, width, first_layer};
  float* mine = state + ((size_t)slots[n] * heads + h) * D * D;
  float s[4][COLS];
  Known known;
  if (begin_next == 1) let_next_begin();
  typedef LowProducts<L_COUNT> Lows;
  Lows lows;
  lows.room = room;
  int columns[L_COUNT], depths[L_COUNT];
  each_place<L_COUNT>([&](auto which) {
    if (!which.depth) return;
    const long long* line = lines + (which.q * (width / 32) + h * (D / 32)) * 6;
    columns[which.q] = (int)line[1]; depths[which.q] = (int)line[3];
    lows.fetch_weights(which, up + line[2]);
  });
  move_state<4, false>(s, mine, threadIdx.x / LANES * 4);  // nothing since the step before writes states
  if (threadIdx.x < 32) known.load(vectors, width, h);
  lows.await_weights();
  wait_for_inputs();
  Raw raw;
  if (threadIdx.x < 32) raw.load(in, n, h);
  each_place<L_COUNT>([&](auto which) {  // a warp each, the first one last: it has more to load
    if (which.depth && which.q % Lows::WARPS == Lows::WARPS - 1 - warp)
      fetch_inputs(lows.inputs(which), projected + (size_t)n * projected_stride + columns[which.q], depths[which.q]);
  });
  __syncthreads();
  if (begin_next == 3) let_next_begin();
  lows.multiply(low);
  __syncthreads();
  decode_head(in, raw, LowInBlock{low}, known, s, mine, n, h, out, eps, begin_next, made, y_all);
}
#endif

// Prompts, 1 of 3: a warp for each row and head; made [heads, rows, P_COUNT, DP].
extern "C" __global__ void __launch_bounds__(256) prepare(
    const elem* projected, const elem* low, elem* v_first, const float* vectors, float* made,
    int projected_stride, int low_stride, int width, int first_layer, int rows, int heads) {
  wait_for_inputs();
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= rows * heads) return;
  const int n = index / heads, h = index % heads;
  const Inputs in = {projected, low, v_first, vectors, projected_stride, low_stride, width, first_layer};
  Known known;
  Raw raw;
  known.load(vectors, width, h);
  raw.load(in, n, h);
  prepare_head(in, raw, LowInMemory(in, n, h), known, n, h, made + ((size_t)h * rows + n) * P_COUNT * DP);
}

// Prompts, 2 of 3: block (row block, head, sequence) walks its sequence token by token; y [rows, heads, D] float32.
extern "C" __global__ void __launch_bounds__(LANES * ROWS / R, 1) scan(
    const float* __restrict__ made, float* __restrict__ y, float* __restrict__ state, const int* __restrict__ starts,
    const int* __restrict__ slots, int rows) {
  extern __shared__ __align__(16) float ring[];
  constexpr int TOKEN = P_COUNT * DP;
  const int h = blockIdx.y, b = blockIdx.z, heads = gridDim.y;
  const int row = blockIdx.x * ROWS + threadIdx.x / LANES * R;
  wait_for_inputs();
  const int first = starts[b], count = starts[b + 1] - first;
  if (count <= 0) return;
  float* mine = state + ((size_t)slots[b] * heads + h) * D * D;
  const Ring<TOKEN> tokens(ring, made + ((size_t)h * rows + first) * TOKEN, count);
  tokens.begin();
  float s[R][COLS];
  move_state<R, false>(s, mine, row);
  walk<Vectors<R>>(tokens, count, row, y + ((size_t)first * heads + h) * D, heads,
      [&](const Vectors<R>& m, float (&out)[R]) { advance<R>(s, m, out); });
  move_state<R, true>(s, mine, row);
}

// Prompts, 3 of 3: a warp for each row and head.
extern "C" __global__ void __launch_bounds__(256) finish(
    const elem* low, const float* vectors, const float* made, const float* y, elem* out,
    int low_stride, int width, int rows, int heads, float eps) {
  wait_for_inputs();
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= rows * heads) return;
  const Inputs in = {0, low, 0, vectors, 0, low_stride, width, 0};
  const int n = index / heads, h = index % heads;
  Known known;
  float gate[CHUNKS];
  known.load(vectors, width, h);
  load_gates(LowInMemory(in, n, h), gate);
  const float* mine = made + ((size_t)h * rows + n) * P_COUNT * DP;
  finish_head(known, gate, mine, y + (size_t)index * D, out + (size_t)n * width + h * D, eps);
}
