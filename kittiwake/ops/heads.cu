// What recurrences with a matrix state share: a column of it (one value channel) is held by 8 lanes of a warp, lane l has key
// channels 4 * (8 g + l) + e; sums over them end with the lanes 4, 2, 1 apart. Stands between base.cu and the kernels.
//
// D: channels of a head · DP: D rounded up to 32. Of a scan: R: columns a thread holds · ROWS: those of a block · STEPS, STAGES:
// tokens staged together, and how often · LOW_DEPTHS, LOW_HELD: see LowProducts.

#define LANES 8
#define COLS (DP / LANES)
#define G (COLS / 4)
#define CHUNKS (DP / 32)

// The products r, k and v of a row and head, of which a warp makes vectors: lane l has channels l + 32 i. `projected` is the
// head's part of the row; the three lie `width` apart.
struct Products {
  float r[CHUNKS], k[CHUNKS], v[CHUNKS];
  __device__ __forceinline__ void load(const elem* projected, int width, int i) {
    const int d = threadIdx.x % 32 + 32 * i;
    const bool inside = d < D;
    r[i] = inside ? widen(projected[d]) : 0.f; k[i] = inside ? widen(projected[width + d]) : 0.f;
    v[i] = inside ? widen(projected[2 * width + d]) : 0.f;
  }
  __device__ __forceinline__ void load(const elem* projected, int width) {
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) load(projected, width, i);
  }
};

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


// The tokens of a scan on their way through shared memory, STEPS of them in each of STAGES stages. TOKEN: float32 values of one.
template <int TOKEN>
struct Ring {
  static constexpr int THREADS = LANES * ROWS / R, STAGE = STEPS * TOKEN;
  float* ring; const float* from; unsigned to; int all;
  // made: the first token of `count` that follow each other
  __device__ __forceinline__ Ring(float* ring, const float* made, int count)
      : ring(ring), from(made + threadIdx.x * 4), to((unsigned)__cvta_generic_to_shared(ring + threadIdx.x * 4)),
        all(count * TOKEN - threadIdx.x * 4) {}
  __device__ __forceinline__ void fetch(int stage) const {
    const float* source = from + (size_t)stage * STAGE;
    const unsigned target = to + stage % STAGES * STAGE * 4;
    const int left = all - stage * STAGE;
    #pragma unroll
    for (int p = 0; p < STAGE; p += THREADS * 4) {
      if (STAGE % (THREADS * 4) == 0 || p + threadIdx.x * 4 < STAGE)
        asm volatile(
            "{ .reg .pred p; setp.gt.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }"
            ::"r"(target + p * 4), "l"(source + p), "r"(left - p) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void begin() const {
    for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage);
  }
};

// Walks `count` tokens: load(vectors, made of a token), then step(vectors, out) moves the columns column .. column + R - 1 on.
// y [count, heads, D], of the first token and this head, gets the sums of `out` over the lanes.
template <class Vectors, int TOKEN, class Step>
__device__ __forceinline__ void walk(const Ring<TOKEN>& ring, int count, int column, float* y, int heads, Step step) {
  // lane l writes column l / (LANES / R), where it is the first of those that hold its sum
  const int lane = threadIdx.x % LANES, own = column + lane / (LANES / R);
  const int writes = lane % (LANES / R) == 0 && own < D;
  float* to = y + own;
  const int stride = heads * D;
  auto write = [&](const float (&out)[R]) {
    const float sum = scattered_sum<R>(out);
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32 [%0], %1; }" ::"l"(to), "f"(sum), "r"(writes) : "memory");
    to += stride;
  };
  float out[R];
  for (int stage = 0; stage * STEPS < count; stage++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    ring.fetch(stage + STAGES - 1);
    const float* now = ring.ring + stage % STAGES * ring.STAGE;
    const int left = count - stage * STEPS;
    Vectors m[2];
    m[0].load(now, column);
    if (left >= STEPS) {
      #pragma unroll
      for (int i = 0; i < STEPS; i++) {
        if (i + 1 < STEPS) m[(i + 1) % 2].load(now + (i + 1) * TOKEN, column);
        step(m[i % 2], out);
        write(out);
      }
    } else {
      for (int i = 0; i < left; i++) {
        m[0].load(now + i * TOKEN, column);
        step(m[0], out);
        write(out);
      }
    }
  }
}

#if DT != 0 && D % 32 == 0 && defined(LOW_DEPTHS)
// Low-rank products of a head that decoding makes itself, 16 outputs of each a warp; each sum walks K as ops/matmul/narrow.cu
// does.
//
// LOW_DEPTHS: the depth of each, rounded up to 16, 0 for one that there is not · LOW_HELD: their weights wait in registers, where
// they keep no other kernel's blocks from a multiprocessor; else in shared memory, in rows of 8 more.

__device__ constexpr int low_depth(int q) {
  constexpr int depths[] = {LOW_DEPTHS};
  return depths[q];
}
__device__ constexpr int low_inputs(int count) {  // of the products in front of the one that is asked for
  int sum = 0;
  for (int q = 0; q < count; q++) sum += low_depth(q);
  return sum;
}

// Calls act with Place<0>, Place<1>, … Place<N - 1>: what follows from their numbers is known to the compiler.
template <int Q>
struct Place {
  static constexpr int q = Q, depth = low_depth(Q), inputs = low_inputs(Q);
};
template <int N, class Do>
__device__ __forceinline__ void each_place(Do&& act) {
  if constexpr (N > 1) each_place<N - 1>(act);
  act(Place<N - 1>{});
}

// A warp copies `depth` inputs of a row, a multiple of 8, and zeros up to the next multiple of 16.
__device__ __forceinline__ void fetch_inputs(elem* x, const elem* from, int depth) {
  for (int k = threadIdx.x % 32 * 8; k < (depth + 15) / 16 * 16; k += 32 * 8)
    *(uint4*)(x + k) = k < depth ? *(const uint4*)(from + k) : make_uint4(0, 0, 0, 0);
}
// A lane's share of the inputs, of which only lanes 0 to 3 hold any: the one row of sixteen that there is.
__device__ __forceinline__ unsigned low_input(const elem* x) { return threadIdx.x % 32 < 4 ? *(const unsigned*)x : 0; }

// N products. `room`: shared memory for the inputs, one behind the other, and behind them for the weights where they are not held.
template <int N>
struct LowProducts {
  static constexpr int WARPS = 2 * DP / 32, TILES = D / 8 / WARPS, DEPTH = low_inputs(N);
  elem* room;
  unsigned w[LOW_HELD ? DEPTH / 16 : 1][TILES][2];  // lane l has 2 of K, and the 2 that are 8 further on, of output l / 4 of a tile

  // Begins to bring the weights of a product: D outputs, in rows of its depth rounded up.
  template <class Which>
  __device__ __forceinline__ void fetch_weights(Which, const elem* from) {
    constexpr int depth = Which::depth;
#if LOW_HELD
    const int lane = threadIdx.x % 32;
    from += (threadIdx.x / 32 * 8 + lane / 4) * depth + lane % 4 * 2;
    #pragma unroll
    for (int step = 0; step < depth / 16; step++) {
      #pragma unroll
      for (int t = 0; t < TILES; t++) {
        unsigned (&to)[2] = w[Which::inputs / 16 + step][t];
        const elem* here = from + t * WARPS * 8 * depth + step * 16;
        to[0] = *(const unsigned*)here, to[1] = *(const unsigned*)(here + 8);
      }
    }
#else
    for (int p = threadIdx.x; p < D * (depth / 8); p += 2 * DP) {
      const int row = p / (depth / 8), k = p % (depth / 8) * 8;
      const unsigned to = (unsigned)__cvta_generic_to_shared(weights(Which{}) + row * (depth + 8) + k);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + (size_t)row * depth + k) : "memory");
    }
#endif
  }
  template <class Which>
  __device__ __forceinline__ elem* weights(Which) const { return room + DEPTH + D * (Which::inputs + 8 * Which::q); }
  template <class Which>
  __device__ __forceinline__ elem* inputs(Which) const { return room + Which::inputs; }
  // What this thread has begun to copy is there; a barrier behind it says so of all threads.
  __device__ __forceinline__ void await_weights() const {
#if !LOW_HELD
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
  }

  // low [N, DP], rounded, is written.
  __device__ __forceinline__ void multiply(float* low) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[N][TILES][4];
    #pragma unroll
    for (int q = 0; q < N; q++)
      #pragma unroll
      for (int t = 0; t < TILES; t++) c[q][t][0] = c[q][t][1] = c[q][t][2] = c[q][t][3] = 0.f;
    #pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
      each_place<N>([&](auto which) {
        typedef decltype(which) Which;
        if (step >= Which::depth / 16) return;
        const elem* x = inputs(which) + step * 16 + lane % 4 * 2;
        const unsigned a0 = low_input(x), a2 = low_input(x + 8);
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
#if LOW_HELD
          const unsigned (&b)[2] = w[Which::inputs / 16 + step][t];
#else
          const elem* from = weights(which) + ((t * WARPS + warp) * 8 + lane / 4) * (Which::depth + 8) + step * 16 + lane % 4 * 2;
          const unsigned b[2] = {*(const unsigned*)from, *(const unsigned*)(from + 8)};
#endif
          add_products(c[Which::q][t], a0, 0, a2, 0, b[0], b[1]);
        }
      });
    }
    if (lane >= 4) return;
    #pragma unroll
    for (int q = 0; q < N; q++) {
      #pragma unroll
      for (int t = 0; t < TILES; t++) {
        float* to = low + q * DP + (t * WARPS + warp) * 8 + lane * 2;
        to[0] = widen(round_only(c[q][t][0])), to[1] = widen(round_only(c[q][t][1]));
      }
    }
  }
};
#endif

// Centres a warp's values of a head, zero beyond D; their group norm is what this returns times them.
__device__ __forceinline__ float centred(float (&x)[CHUNKS], float mean, float eps) {
  const int lane = threadIdx.x % 32;
  float variance = 0.f;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    x[i] = lane + 32 * i < D ? x[i] - mean : 0.f;
    variance += warp_sum(x[i] * x[i]);
  }
  return 1.f / sqrtf(variance / D + eps);
}
