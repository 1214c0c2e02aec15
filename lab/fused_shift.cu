// Addition, layer norm, token shift and mixes inside the product that reads them, for decode steps of a few rows; to be
// compiled behind narrow.cu. Every block of the product makes the mixed rows of its own input, so that nothing of them
// passes through memory; what the step needs once is written by the first block.
//
// The sums of a norm are defined by a tree of VIRTUAL warps that no launch changes: a lane adds its quads of columns, one every
// VIRTUAL * 32 quads, in order; lanes of a warp are added by halves, then the warps. So a block of any number of threads, and
// blocks of a cluster that share the columns, make the same bits as shift_rows below, which takes any rows of any prompts.
//
// WIDTH: columns of a row · WORKERS: threads of a block · CLUSTER: blocks that share the norm of a row, 1, 2, 4 or 8 · for the
// product also REAL: rows, at most 4 where ROWS is 8, 1 where it is 1; without it shift_rows is compiled · BN, WN, BK, STAGES as
// in narrow.cu.

#if DT != 0
constexpr int VIRTUAL = 8;
constexpr int OWN = VIRTUAL / CLUSTER, WORKING = WORKERS / 32 < OWN ? WORKERS / 32 : OWN, TURNS = OWN / WORKING;
constexpr int QUADS = (WIDTH + VIRTUAL * 128 - 1) / (VIRTUAL * 128);
constexpr bool IS_EVEN = WIDTH % (VIRTUAL * 128) == 0;

// Volatile: these stay on their side of the wait for the kernel in front.
__device__ __forceinline__ void load_floats(float (&q)[4], const float* from) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(q[0]), "=f"(q[1]), "=f"(q[2]), "=f"(q[3]) : "l"(from) : "memory");
}
__device__ __forceinline__ uint2 load_elems(const elem* from) {
  uint2 q;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(q.x), "=r"(q.y) : "l"(from) : "memory");
  return q;
}
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_all() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet() { arrive(); await_all(); }
__device__ __forceinline__ void tell(float* to, float value) {  // in every block of the cluster
  const unsigned here = (unsigned)__cvta_generic_to_shared(to);
  #pragma unroll
  for (int block = 0; block < CLUSTER; block++)
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }"
                 ::"r"(here), "r"(block), "f"(value) : "memory");
}
__device__ __forceinline__ void tell_quad(float* to, const float (&q)[4]) {
  const unsigned here = (unsigned)__cvta_generic_to_shared(to);
  #pragma unroll
  for (int block = 0; block < CLUSTER; block++)
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }"
                 ::"r"(here), "r"(block), "f"(q[0]), "f"(q[1]), "f"(q[2]), "f"(q[3]) : "memory");
}
#else
#define CLUSTERED
__device__ __forceinline__ void meet() { __syncthreads(); }
__device__ __forceinline__ void tell(float* to, float value) { *to = value; }
#endif

struct Share { float v[TURNS][QUADS][4]; };  // what a thread holds of a row: quads of columns

// Where a thread stands in the tree.
struct Seat {
  int warp, lane, column;  // virtual warp and first column of the first turn
  bool works;
  __device__ __forceinline__ Seat(int rank) {
    works = (int)threadIdx.x / 32 < WORKING;
    warp = rank * OWN + threadIdx.x / 32, lane = threadIdx.x % 32, column = (warp * 32 + lane) * 4;
  }
  __device__ __forceinline__ int at(int turn, int i) const { return column + turn * WORKING * 128 + i * VIRTUAL * 128; }
  __device__ __forceinline__ bool holds(int turn, int i) const { return works && (IS_EVEN || at(turn, i) < WIDTH); }
  template <class Do>
  __device__ __forceinline__ void each(Do act) const {
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      #pragma unroll
      for (int i = 0; i < QUADS; i++) act(turn, i, at(turn, i), holds(turn, i));
  }
  __device__ __forceinline__ void load(Share& to, const float* from) const {
    each([&](int turn, int i, int at, bool is_held) {
      float (&q)[4] = to.v[turn][i];
      q[0] = q[1] = q[2] = q[3] = 0.f;
      if (is_held) load_floats(q, from + at);
    });
  }
};

__device__ __forceinline__ void store_floats(float* to, const float (&q)[4]) { *(float4*)to = make_float4(q[0], q[1], q[2], q[3]); }

// x + y of COUNT rows; row r stands at row index[r] of both.
template <int COUNT>
__device__ __forceinline__ void load_rows(Share (&rows)[COUNT], const float* x, const elem* y, const int (&index)[COUNT], const Seat& seat) {
  uint2 more[COUNT][TURNS][QUADS];
  #pragma unroll
  for (int r = 0; r < COUNT; r++) {
    seat.load(rows[r], x + (size_t)index[r] * WIDTH);
    seat.each([&](int turn, int i, int at, bool is_held) {
      if (y && is_held) more[r][turn][i] = load_elems(y + (size_t)index[r] * WIDTH + at);
    });
  }
  #pragma unroll
  for (int r = 0; r < COUNT; r++)
    seat.each([&](int turn, int i, int, bool is_held) {
      if (y && is_held) {
        const uint2 q = more[r][turn][i];
        float (&to)[4] = rows[r].v[turn][i];
        to[0] += widen((elem)(q.x & 0xffff)), to[1] += widen((elem)(q.x >> 16));
        to[2] += widen((elem)(q.y & 0xffff)), to[3] += widen((elem)(q.y >> 16));
      }
    });
}

// Layer norm of COUNT rows in place; sums: [2, COUNT, VIRTUAL] of shared memory, in every block of a cluster.
template <int COUNT>
__device__ __forceinline__ void norm_rows(Share (&rows)[COUNT], const Share& weight, const Share& bias, float* sums, const Seat& seat, float eps) {
  #pragma unroll
  for (int pass = 0; pass < 2; pass++) {
    #pragma unroll
    for (int r = 0; r < COUNT; r++) {
      #pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        float sum = 0.f;
        #pragma unroll
        for (int i = 0; i < QUADS; i++) {
          const float (&q)[4] = rows[r].v[turn][i];
          sum += pass ? (q[0] * q[0] + q[1] * q[1]) + (q[2] * q[2] + q[3] * q[3]) : (q[0] + q[1]) + (q[2] + q[3]);
        }
        #pragma unroll
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
        if (seat.works && seat.lane == 0) tell(sums + (pass * COUNT + r) * VIRTUAL + seat.warp + turn * WORKING, sum);
      }
    }
    meet();
    #pragma unroll
    for (int r = 0; r < COUNT; r++) {
      const float4 a = *(const float4*)(sums + (pass * COUNT + r) * VIRTUAL), b = *(const float4*)(sums + (pass * COUNT + r) * VIRTUAL + 4);
      const float mean = (((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) / WIDTH;
      const float scale = pass ? 1.f / sqrtf(mean + eps) : 0.f;
      seat.each([&](int turn, int i, int, bool is_held) {
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          float& value = rows[r].v[turn][i][e];
          if (pass) value = value * scale * weight.v[turn][i][e] + bias.v[turn][i][e];
          else value = is_held ? value - mean : 0.f;
        }
      });
    }
  }
}

__device__ __forceinline__ uint2 mixed_quad(const float (&normed)[4], const float (&gap)[4], const float (&mix)[4]) {
  unsigned part[4];
  #pragma unroll
  for (int e = 0; e < 4; e++) part[e] = round_only(normed[e] + gap[e] * mix[e]);
  return make_uint2(part[0] | part[1] << 16, part[2] | part[3] << 16);
}

#ifndef REAL
// As shift_kernel of ops/shift_mix/triton.py, without gates: block (row, mix), or (row, 0) for all mixes where gridDim.y is 1.
extern "C" __global__ void __launch_bounds__(WORKERS) shift_rows(
    const float* x, const elem* y, float* x_out, const float* norm, const float* mixes, const float* shift, const int* owners,
    const int* starts, const int* slots, elem* mixed, float* last, int count, int mixed_stride, int has_y, float eps, int begin_next) {
  if (!has_y) y = nullptr;
  __shared__ __align__(16) float sums[2 * 2 * VIRTUAL];
  const Seat seat(0);
  const int n = blockIdx.x, owner = owners[n];
  bool is_first = true, is_last = false;
  Share weight, bias, before, mix;
  if (begin_next == 1) let_next_begin();
  seat.load(weight, norm);
  seat.load(bias, norm + WIDTH);
  if (owner >= 0) {
    is_first = n == starts[owner], is_last = n == starts[owner + 1] - 1;
    if (is_first) seat.load(before, shift + (size_t)slots[owner] * WIDTH);
  } else {
    seat.each([&](int turn, int i, int, bool) { for (int e = 0; e < 4; e++) before.v[turn][i][e] = 0.f; });
  }
  const int first = gridDim.y == 1 ? 0 : blockIdx.y, end = gridDim.y == 1 ? count : first + 1;
  seat.load(mix, mixes + first * WIDTH);
  wait_for_inputs();
  const bool leads = blockIdx.y == 0;
  Share here;
  auto keep = [&](const Share& row) {
    if (leads) seat.each([&](int turn, int i, int at, bool is_held) { if (is_held) store_floats(x_out + (size_t)n * WIDTH + at, row.v[turn][i]); });
  };
  if (is_first) {
    Share rows[1];
    load_rows(rows, x, y, {n}, seat);
    keep(rows[0]);
    norm_rows(rows, weight, bias, sums, seat, eps);
    here = rows[0];
  } else {
    Share rows[2];
    load_rows(rows, x, y, {n, n - 1}, seat);
    keep(rows[0]);
    norm_rows(rows, weight, bias, sums, seat, eps);
    here = rows[0], before = rows[1];
  }
  if (leads && is_last)
    seat.each([&](int turn, int i, int at, bool is_held) { if (is_held) store_floats(last + (size_t)owner * WIDTH + at, here.v[turn][i]); });
  seat.each([&](int turn, int i, int, bool) { for (int e = 0; e < 4; e++) before.v[turn][i][e] -= here.v[turn][i][e]; });
  for (int m = first; m < end; m++) {
    if (m > first) seat.load(mix, mixes + m * WIDTH);
    seat.each([&](int turn, int i, int at, bool is_held) {
      if (is_held) *(uint2*)(mixed + (size_t)m * mixed_stride + (size_t)n * WIDTH + at) = mixed_quad(here.v[turn][i], before.v[turn][i], mix.v[turn][i]);
    });
  }
}
#else
#define LEAD (STAGES - 1)
#define W_BYTES (STAGES * BN * STRIDE * 2)
#define X_BYTES (REAL * (WIDTH + 8) * 2)
__device__ __forceinline__ int w_place(int row, int k) { return (row * STRIDE + k) * 2; }
__device__ __forceinline__ int x_place(int row, int k) { return (row * (WIDTH + 8) + k) * 2; }

// One row a sequence. tiles: blocks that make columns; a grid is whole clusters. lines and out as in narrow.cu; every line's
// depth is WIDTH, a multiple of BK, and its input a row of mixes.
extern "C" __global__ void CLUSTERED __launch_bounds__(WORKERS) fused_product(
    const float* x, const elem* y, float* x_out, const float* norm, const float* mixes, const float* shift, const int* slots,
    float* last, const elem* w, out_t* out, const long long* lines, const int* activations, int tiles, int out_stride, int has_y,
    float eps, int begin_next) {
  if (!has_y) y = nullptr;
  extern __shared__ __align__(16) elem shared[];  // weights, mixed rows, sums, in a cluster normed rows and gaps
  const unsigned w_at = (unsigned)__cvta_generic_to_shared(shared), x_at = w_at + W_BYTES;
  float* sums = (float*)((char*)shared + W_BYTES + X_BYTES);
  if (begin_next == 1) let_next_begin();
  const int column = min((int)blockIdx.x, tiles - 1) * BN, inner = BN < 32 ? column % 32 : 0;
  const long long* line = lines + column / 32 * 6;
  constexpr int STEPS = WIDTH / BK, W_STEP = W_BYTES / STAGES;
  constexpr int PER_ROW = BK / 8, SKIP = WORKERS / PER_ROW;
  const int own_row = threadIdx.x / PER_ROW, own_k = threadIdx.x % PER_ROW * 8;
  const unsigned own_at = w_at + w_place(own_row, own_k);
  const char* w_from = (const char*)(w + line[2] + (size_t)(inner + own_row) * WIDTH + own_k);
  auto fetch_w = [&](int step) {
    const unsigned to = own_at + step % STAGES * W_STEP;
    const char* from = w_from + (size_t)step * (BK * 2);
    #pragma unroll
    for (int i = 0; i < BN; i += SKIP, from += (size_t)SKIP * WIDTH * 2)
      copy_ahead(to + w_place(i, 0), from, 16, step < STEPS && (BN % SKIP == 0 || own_row + i < BN));
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  #pragma unroll
  for (int s = 0; s < LEAD; s++) fetch_w(s);
  const Seat seat(blockIdx.x % CLUSTER);
  Share weight, bias, before[REAL];
  seat.load(weight, norm);
  seat.load(bias, norm + WIDTH);
  int index[REAL];
  #pragma unroll
  for (int r = 0; r < REAL; r++) {
    index[r] = r;
    seat.load(before[r], shift + (size_t)slots[r] * WIDTH);
  }
  const float* own_mix = mixes + line[0] * WIDTH;
#if CLUSTER == 1
  Share mix;
  seat.load(mix, own_mix);
#else
  constexpr int ALL = (WIDTH / 4 + WORKERS - 1) / WORKERS;
  float mix[ALL][4];
  #pragma unroll
  for (int i = 0; i < ALL; i++)
    if (i * WORKERS + threadIdx.x < WIDTH / 4) load_floats(mix[i], own_mix + (i * WORKERS + threadIdx.x) * 4);
  arrive();  // that every block of the cluster has begun
#endif
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  Share rows[REAL];
  load_rows(rows, x, y, index, seat);
  const bool leads = blockIdx.x < CLUSTER;
  auto keep = [&](float* to) {
    #pragma unroll
    for (int r = 0; r < REAL; r++)
      if (leads) seat.each([&](int turn, int i, int at, bool is_held) { if (is_held) store_floats(to + (size_t)r * WIDTH + at, rows[r].v[turn][i]); });
  };
#if CLUSTER > 1
  await_all();
#endif
  keep(x_out);
  norm_rows(rows, weight, bias, sums, seat, eps);
#if CLUSTER == 1
  #pragma unroll
  for (int r = 0; r < REAL; r++)
    seat.each([&](int turn, int i, int at, bool is_held) {
      const float (&here)[4] = rows[r].v[turn][i];
      float gap[4];
      #pragma unroll
      for (int e = 0; e < 4; e++) gap[e] = before[r].v[turn][i][e] - here[e];
      if (is_held) *(uint2*)((char*)shared + W_BYTES + x_place(r, at)) = mixed_quad(here, gap, mix.v[turn][i]);
    });
#else
  float* exchanged = sums + 2 * REAL * VIRTUAL;  // [REAL, 2, WIDTH]
  #pragma unroll
  for (int r = 0; r < REAL; r++)
    seat.each([&](int turn, int i, int at, bool is_held) {
      const float (&here)[4] = rows[r].v[turn][i];
      float gap[4];
      #pragma unroll
      for (int e = 0; e < 4; e++) gap[e] = before[r].v[turn][i][e] - here[e];
      if (is_held) tell_quad(exchanged + 2 * r * WIDTH + at, here), tell_quad(exchanged + (2 * r + 1) * WIDTH + at, gap);
    });
  meet();
  #pragma unroll
  for (int r = 0; r < REAL; r++)
    #pragma unroll
    for (int i = 0; i < ALL; i++) {
      const int at = (i * WORKERS + threadIdx.x) * 4;
      if (at < WIDTH) {
        const float4 h = *(const float4*)(exchanged + 2 * r * WIDTH + at), g = *(const float4*)(exchanged + (2 * r + 1) * WIDTH + at);
        const float here[4] = {h.x, h.y, h.z, h.w}, gap[4] = {g.x, g.y, g.z, g.w};
        *(uint2*)((char*)shared + W_BYTES + x_place(r, at)) = mixed_quad(here, gap, mix[i]);
      }
    }
#endif
  keep(last);
#if CLUSTER > 1
  if ((int)blockIdx.x >= tiles) return;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto put = [&](int row, int at, float value) {
    if (row < REAL && at < columns) {
      if (activation) value = activated(widen(round_only(value)), activation);
#if OUT32
      out[(size_t)row * out_stride + first + at] = value;
#else
      out[(size_t)row * out_stride + first + at] = round_only(value);
#endif
    }
  };
  const bool sums_here = warp < BN / WN;
  const unsigned w_lane = w_at + ((warp * WN + lane % 8) * STRIDE + lane / 8 * 8) * 2;
  // rows that do not exist repeat others: nobody reads their sums
  const unsigned x_lane = x_at + (lane % 8 % REAL * (WIDTH + 8) + lane / 8 * 8) * 2;
  float c[MT][NT][4];
  #pragma unroll
  for (int n = 0; n < NT; n++) c[0][n][0] = c[0][n][1] = c[0][n][2] = c[0][n][3] = 0.f;
  #pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEAD - 1) : "memory");
    __syncthreads();
    const unsigned w_now = w_lane + step % STAGES * W_STEP, x_now = x_lane + step * BK * 2;
    Operands now[2];
    if (sums_here) now[0].load(w_now, x_now, 0);
    fetch_w(step + LEAD);
    if (sums_here) {
      #pragma unroll
      for (int i = 0; i < BK / KC; i++) {
        if (i + 1 < BK / KC) now[(i + 1) % 2].load(w_now, x_now, (i + 1) * KC);
        now[i % 2].multiply_into(c);
      }
    }
  }
  if (begin_next == 2) let_next_begin();
  if (!sums_here) return;
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 4; e++) put(lane / 4 + e / 2 * 8, warp * WN + n * 8 + lane % 4 * 2 + e % 2, c[0][n][e]);
}
#endif
#endif
