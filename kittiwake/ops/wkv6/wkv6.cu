// WKV-6 on CUDA, and WKV-5, whose decays are constant: the time mix between its products, for prompts in three launches
// and for decoding in one.
//
// Equations: RWKV-LM, RWKV-v5/src/model.py; arXiv 2404.05892. The readable twin is reference.py.
//
// One arithmetic serves all: a column of the state (one value channel) is held by 8 lanes of a warp, lane l has key
// channels 4 * (8 g + l) + e. Its output is summed over g in order for each e, then (0 + 1) + (2 + 3), then over the lanes
// 4, 2, 1 apart; nothing waits for that sum. Which columns share a thread or a block changes nothing. Sums over a head's
// channels are taken 32 channels at a time by a warp, 16, 8, 4, 2, 1 apart, and those sums added in order.
//
// D: channels of a head · DP: D rounded up to 32 · DT: see base.cu · BY_TOKEN: decays follow from the token (RWKV-6) ·
// GATED: there is a gate (not in RWKV-5.0) · R, ROWS, STEPS, STAGES: see heads.cu.

#if BY_TOKEN
enum { P_R, P_K, P_V, P_W, P_COUNT };  // the vectors of one token and head, [P_COUNT, DP] float32
#else
enum { P_R, P_K, P_V, P_COUNT };
#endif
enum { V_DECAY, V_BONUS, V_NORM_WEIGHT, V_NORM_BIAS };  // rows of a layer's vectors [4, C]

__device__ __forceinline__ float decay_of(float exponent) { return expf(-expf(exponent)); }

// What a layer knows of a head's channels: lane l of a warp has channels l + 32 i.
struct Known {
  float decay[CHUNKS], bonus[CHUNKS], weight[CHUNKS], bias[CHUNKS];
  __device__ __forceinline__ void load(const float* vectors, int C, int h) {
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int d = threadIdx.x % 32 + 32 * i;
      const float* v = vectors + h * D + d;
      const bool inside = d < D;
      decay[i] = inside && BY_TOKEN ? v[V_DECAY * C] : 0.f; bonus[i] = inside ? v[V_BONUS * C] : 0.f;
      weight[i] = inside ? v[V_NORM_WEIGHT * C] : 0.f; bias[i] = inside ? v[V_NORM_BIAS * C] : 0.f;
    }
  }
};

// The low-rank product of the decay of a row and head, channel d: from memory, or from shared memory where this block made it.
struct LowInMemory {
  const elem* at;
  __device__ __forceinline__ float operator()(int d) const { return widen(at[d]); }
};
struct LowInBlock {
  const float* at;
  __device__ __forceinline__ float operator()(int d) const { return at[d]; }
};

// A warp makes the vectors of a row and head in `out` [P_COUNT, DP]. Columns of `projected`: r, k, v and, with a gate, g.
template <class Low>
__device__ __forceinline__ void prepare_head(const Products& raw, const Low& low, const Known& known, float* out) {
  float w[CHUNKS];
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {  // all loads before the first use
    const int d = threadIdx.x % 32 + 32 * i;
    w[i] = BY_TOKEN && d < D ? low(d) : 0.f;
  }
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = threadIdx.x % 32 + 32 * i;
    out[P_R * DP + d] = raw.r[i]; out[P_K * DP + d] = raw.k[i]; out[P_V * DP + d] = raw.v[i];
#if BY_TOKEN
    out[P_W * DP + d] = d < D ? decay_of(known.decay[i] + w[i]) : 0.f;
#endif
  }
}

__device__ __forceinline__ void load_gates(const elem* projected, int C, float (&gate)[CHUNKS]) {  // projected of row and head
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = threadIdx.x % 32 + 32 * i;
    gate[i] = GATED && d < D ? widen(projected[3 * C + d]) : 0.f;
  }
}

// A warp turns y [DP] of a row and head into what the output product eats: bonus, group norm, gate; `to` is the head's.
__device__ __forceinline__ void finish_head(
    const Known& known, const float (&gate)[CHUNKS], const float* made, const float* y, elem* to, float eps) {
  const int lane = threadIdx.x % 32;
  float x[CHUNKS], sum = 0.f, bonus = 0.f;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    bonus += warp_sum(made[P_R * DP + d] * known.bonus[i] * made[P_K * DP + d]);
  }
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    x[i] = d < D ? fmaf(bonus, made[P_V * DP + d], y[d]) : 0.f;
    sum += warp_sum(x[i]);
  }
  const float scale = centred(x, sum / D, eps);
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int d = lane + 32 * i;
    const float normed = fmaf(x[i] * scale, known.weight[i], known.bias[i]);
    if (d < D) to[d] = narrow(GATED ? normed * (gate[i] * sigmoid(gate[i])) : normed);
  }
}

// The decays of a thread's key channels, where no token changes them.
__device__ __forceinline__ void load_decays(const float* vectors, int C, int h, float4 (&w)[G]) {
  #pragma unroll
  for (int g = 0; g < G; g++) {
    float* part = (float*)&w[g];
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const int d = 4 * (g * LANES + threadIdx.x % LANES) + e;
      part[e] = d < D ? decay_of(vectors[V_DECAY * C + h * D + d]) : 0.f;
    }
  }
}

// The vectors of one token, as a thread needs them: its key channels, and the values of its N columns.
template <int N>
struct Vectors {
  float4 r[G], k[G];
#if BY_TOKEN
  float4 w[G];
#endif
  float v[N];
  __device__ __forceinline__ void load(const float* made, int column) {  // made [P_COUNT, DP]
    const float4* m = (const float4*)made + threadIdx.x % LANES;
    #pragma unroll
    for (int g = 0; g < G; g++) {
      r[g] = m[P_R * (DP / 4) + g * LANES]; k[g] = m[P_K * (DP / 4) + g * LANES];
#if BY_TOKEN
      w[g] = m[P_W * (DP / 4) + g * LANES];
#endif
    }
    #pragma unroll
    for (int j = 0; j < N; j++) v[j] = made[P_V * DP + column + j];
  }
};

// One token on N columns of the state that a thread holds, s[column][key channel]; y: this lane's share of each output.
template <int N>
__device__ __forceinline__ void advance(float (&s)[N][COLS], const Vectors<N>& m, const float4 (&constant)[G], float (&y)[N]) {
#if BY_TOKEN
  const float4 (&w)[G] = m.w;
#else
  const float4 (&w)[G] = constant;
#endif
  #pragma unroll
  for (int j = 0; j < N; j++) {
    float p0 = 0.f, p1 = 0.f, p2 = 0.f, p3 = 0.f;
    #pragma unroll
    for (int g = 0; g < G; g++) {
      float* t = &s[j][4 * g];
      p0 = fmaf(t[0], m.r[g].x, p0); p1 = fmaf(t[1], m.r[g].y, p1);
      p2 = fmaf(t[2], m.r[g].z, p2); p3 = fmaf(t[3], m.r[g].w, p3);
      t[0] = fmaf(t[0], w[g].x, m.v[j] * m.k[g].x); t[1] = fmaf(t[1], w[g].y, m.v[j] * m.k[g].y);
      t[2] = fmaf(t[2], w[g].z, m.v[j] * m.k[g].z); t[3] = fmaf(t[3], w[g].w, m.v[j] * m.k[g].w);
    }
    y[j] = (p0 + p1) + (p2 + p3);
  }
}

// The token of block (head h, sequence n), once its state is in registers and its low-rank product is known; `raw` and `gate`
// are the first warp's.
template <class Low>
__device__ __forceinline__ void decode_head(
    const Products& raw, const float (&gate)[CHUNKS], const Low& low, const Known& known, const float4 (&constant)[G],
    float (&s)[4][COLS], float* state, int n, int h, int width, elem* out, float eps, int begin_next, float* made,
    float* y_all) {
  const int column = threadIdx.x / LANES * 4;
  if (threadIdx.x < 32) prepare_head(raw, low, known, made);
  __syncthreads();
  float y[4];
  Vectors<4> m;
  m.load(made, column);
  advance<4>(s, m, constant, y);
  const float sum = scattered_sum<4>(y);
  if (threadIdx.x % (LANES / 4) == 0) y_all[column + threadIdx.x % LANES / (LANES / 4)] = sum;
  move_state<4, true>(s, state, column);
  __syncthreads();
  if (begin_next == 2) let_next_begin();
  if (threadIdx.x < 32) finish_head(known, gate, made, y_all, out + (size_t)n * width + h * D, eps);
}

// Decoding: block (head, sequence), one row a sequence; 2 * DP threads of 4 columns each. low [B, C] where BY_TOKEN.
extern "C" __global__ void __launch_bounds__(2 * DP) decode(
    const elem* projected, const elem* low, const float* vectors, float* state, const int* slots, elem* out,
    int projected_stride, int low_stride, int width, float eps, int begin_next) {
  __shared__ __align__(16) float made[P_COUNT * DP];
  __shared__ float y_all[DP];
  const int h = blockIdx.x, n = blockIdx.y, heads = gridDim.x;
  float* mine = state + ((size_t)slots[n] * heads + h) * D * D;
  float s[4][COLS];
  float4 constant[G];
  Known known;
  if (begin_next == 1) let_next_begin();
  move_state<4, false>(s, mine, threadIdx.x / LANES * 4);  // nothing since the step before writes states
  if (!BY_TOKEN) load_decays(vectors, width, h, constant);
  if (threadIdx.x < 32) known.load(vectors, width, h);
  wait_for_inputs();
  Products raw;
  float gate[CHUNKS];
  if (threadIdx.x < 32) {
    const elem* own = projected + (size_t)n * projected_stride + h * D;
    raw.load(own, width);
    load_gates(own, width, gate);
  }
  const LowInMemory lows = {low + (size_t)n * low_stride + h * D};
  decode_head(raw, gate, lows, known, constant, s, mine, n, h, width, out, eps, begin_next, made, y_all);
}

#if BY_TOKEN && DT != 0 && D % 32 == 0 && defined(LOW_DEPTHS)
// The same with the low-rank product inside, for few sequences; `up`: its weights [C, depth rounded up to 16]. The product reads
// `projected` from column `low_column` on.
extern "C" __global__ void __launch_bounds__(2 * DP) decode_low(
    const elem* projected, const elem* up, const float* vectors, float* state, const int* slots, elem* out,
    int low_column, int depth, int projected_stride, int width, float eps, int begin_next) {
  extern __shared__ __align__(16) elem room[];
  __shared__ __align__(16) float made[P_COUNT * DP];
  __shared__ float y_all[DP], low[DP];
  const int h = blockIdx.x, n = blockIdx.y, heads = gridDim.x, warp = threadIdx.x / 32;
  float* mine = state + ((size_t)slots[n] * heads + h) * D * D;
  float s[4][COLS];
  float4 constant[G];
  Known known;
  if (begin_next == 1) let_next_begin();
  typedef LowProducts<1> Lows;
  Lows lows;
  lows.room = room;
  lows.fetch_weights(Place<0>{}, up + (size_t)h * D * low_depth(0));
  move_state<4, false>(s, mine, threadIdx.x / LANES * 4);
  if (threadIdx.x < 32) known.load(vectors, width, h);
  lows.await_weights();
  wait_for_inputs();
  Products raw;
  float gate[CHUNKS];
  if (threadIdx.x < 32) {
    const elem* own = projected + (size_t)n * projected_stride + h * D;
    raw.load(own, width);
    load_gates(own, width, gate);
  }
  if (warp == Lows::WARPS - 1) fetch_inputs(lows.inputs(Place<0>{}), projected + (size_t)n * projected_stride + low_column, depth);
  __syncthreads();
  if (begin_next == 3) let_next_begin();
  lows.multiply(low);
  __syncthreads();
  decode_head(raw, gate, LowInBlock{low}, known, constant, s, mine, n, h, width, out, eps, begin_next, made, y_all);
}
#endif

// Prompts, 1 of 3: a warp for each row and head; made [heads, rows, P_COUNT, DP].
extern "C" __global__ void __launch_bounds__(256) prepare(
    const elem* projected, const elem* low, const float* vectors, float* made, int projected_stride, int low_stride,
    int width, int rows, int heads) {
  wait_for_inputs();
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= rows * heads) return;
  const int n = index / heads, h = index % heads;
  Known known;
  known.load(vectors, width, h);
  Products raw;
  raw.load(projected + (size_t)n * projected_stride + h * D, width);
  const LowInMemory lows = {low + (size_t)n * low_stride + h * D};
  prepare_head(raw, lows, known, made + ((size_t)h * rows + n) * P_COUNT * DP);
}

// Prompts, 2 of 3: block (columns, head, sequence) walks its sequence token by token; y [rows, heads, D] float32.
extern "C" __global__ void __launch_bounds__(LANES * ROWS / R, 1) scan(
    const float* made, const float* vectors, float* y, float* state, const int* starts, const int* slots, int rows, int width) {
  extern __shared__ __align__(16) float ring[];
  constexpr int TOKEN = P_COUNT * DP;
  const int h = blockIdx.y, b = blockIdx.z, heads = gridDim.y;
  const int column = blockIdx.x * ROWS + threadIdx.x / LANES * R;
  const int first = starts[b], count = starts[b + 1] - first;
  float* mine = state + ((size_t)slots[b] * heads + h) * D * D;
  float s[R][COLS];
  float4 constant[G];
  if (count > 0) {
    move_state<R, false>(s, mine, column);  // nothing since the step before writes states
    if (!BY_TOKEN) load_decays(vectors, width, h, constant);
  }
  wait_for_inputs();
  if (count <= 0) return;
  const Ring<TOKEN> tokens(ring, made + ((size_t)h * rows + first) * TOKEN, count);
  tokens.begin();
  walk<Vectors<R>>(tokens, count, column, y + ((size_t)first * heads + h) * D, heads,
      [&](const Vectors<R>& m, float (&out)[R]) { advance<R>(s, m, constant, out); });
  move_state<R, true>(s, mine, column);
}

// Prompts, 3 of 3: a warp for each row and head.
extern "C" __global__ void __launch_bounds__(256) finish(
    const elem* projected, const float* vectors, const float* made, const float* y, elem* out, int projected_stride,
    int width, int rows, int heads, float eps) {
  wait_for_inputs();
  const int index = blockIdx.x * 8 + threadIdx.x / 32;
  if (index >= rows * heads) return;
  const int n = index / heads, h = index % heads;
  Known known;
  float gate[CHUNKS];
  known.load(vectors, width, h);
  load_gates(projected + (size_t)n * projected_stride + h * D, width, gate);
  const float* mine = made + ((size_t)h * rows + n) * P_COUNT * DP;
  finish_head(known, gate, mine, y + (size_t)index * D, out + (size_t)n * width + h * D, eps);
}
