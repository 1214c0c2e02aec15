// Products of few rows with weights that stream from memory: K in order, m16n8k16 by m16n8k16, so the bits are those of
// any other product that walks K in order on the same matrix units (layers/cuda_probe.py proves it).
//
// A block makes BN output columns of ROWS rows; a warp makes WN of the columns. Weights are staged ahead through shared
// memory, and the first stages are fetched before the kernel in front has ended: weights do not depend on it.
//
// DT: 1 float16, 2 bfloat16 · BN, WN: columns of a block, of a warp · BK: K of a stage · STAGES · ROWS: 1, 8, 16, 32 or 64 ·
// OUT32: outputs are float32 · BEGIN_NEXT: when the next kernel may begin, see cuda.py.

// x has the precision of elem already. What float16 cannot hold becomes its largest number, not infinity.
__device__ __forceinline__ float activated(float x, int activation) {
  if (activation == 1) x = fabsf(x) < 1.1754943508222875e-38f ? x : tanhf(x);  // as in triton.py
  else if (activation == 2) x = sigmoid(x);
  else if (activation == 3) { x = x > 0.f ? x * x : (x <= 0.f ? 0.f : x); if (DT == 1) x = x > 65504.f ? 65504.f : x; }
  return x;
}

// The same on a product that stands in memory: columns of y [rows, y_stride], in place; 8 of them a thread.
extern "C" __global__ void __launch_bounds__(256) activate(elem* y, int columns, int y_stride, int activation) {
  const int column = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (column >= columns) return;
  elem* here = y + (size_t)blockIdx.x * y_stride + column;
#if DT != 0
  if (column + 8 <= columns && (unsigned long long)here % 16 == 0) {
    uint4 words = *(uint4*)here;
    elem* part = (elem*)&words;
    #pragma unroll
    for (int i = 0; i < 8; i++) part[i] = round_only(activated(widen(part[i]), activation));
    *(uint4*)here = words;
    return;
  }
#endif
  for (int i = 0; i < 8 && column + i < columns; i++) here[i] = round_only(activated(widen(here[i]), activation));
}

#if DT != 0
#if OUT32
typedef float out_t;
#else
typedef elem out_t;
#endif
#define STRIDE (BK + 8)  // shared rows of 16 bytes more: no two of a matrix load's rows meet in a bank
#define THREADS (BN / WN * 32)
#define MT (ROWS < 16 ? 1 : ROWS / 16)  // row tiles of a matrix instruction
#define NT (WN / 8)  // column tiles of a warp
#define KC (MT * NT > 2 ? 32 : 64)  // K whose operands are held in registers, twice: these in use, the next on their way

__device__ __forceinline__ void copy_ahead(unsigned to, const char* from, int bytes, int is_wanted) {  // the rest of 16 bytes is zero
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }"
               ::"r"(to), "l"(from), "r"(bytes), "r"(is_wanted) : "memory");
}
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

// The operands of KC of K: weights by 32, rows by 16 (up to 8 rows: by 32, the lower half of a tile being nothing).
struct Operands {
  unsigned b[KC / 32][NT][4], a[ROWS <= 8 ? KC / 32 : KC / 16][MT][4];
  __device__ __forceinline__ void load(unsigned w_lane, unsigned x_lane, int k) {
    #pragma unroll
    for (int i = 0; i < KC / 32; i++) {
      #pragma unroll
      for (int n = 0; n < NT; n++) load_matrices(b[i][n], w_lane + (n * 8 * STRIDE + k + i * 32) * 2);
      if (ROWS <= 8) load_matrices(a[i][0], x_lane + (k + i * 32) * 2);
    }
    if (ROWS > 8) {
      #pragma unroll
      for (int i = 0; i < KC / 16; i++) {
        #pragma unroll
        for (int t = 0; t < MT; t++) load_matrices(a[i][t], x_lane + (t * 16 * STRIDE + k + i * 16) * 2);
      }
    }
  }
  __device__ __forceinline__ void multiply_into(float (&c)[MT][NT][4]) const {
    #pragma unroll
    for (int i = 0; i < KC / 16; i++) {
      #pragma unroll
      for (int t = 0; t < MT; t++) {
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          const unsigned b0 = b[i / 2][n][i % 2 * 2], b1 = b[i / 2][n][i % 2 * 2 + 1];
          if (ROWS <= 8) add_products(c[t][n], a[i / 2][t][i % 2 * 2], 0, a[i / 2][t][i % 2 * 2 + 1], 0, b0, b1);
          else add_products(c[t][n], a[i][t][0], a[i][t][1], a[i][t][2], a[i][t][3], b0, b1);
        }
      }
    }
  }
};

// lines: int64 [columns / 32, 6]: input, first column of x, first element of w, depth, first column of y, columns left.
extern "C" __global__ void __launch_bounds__(THREADS) product(
    const elem* __restrict__ x, const elem* __restrict__ w, out_t* __restrict__ y, const long long* __restrict__ lines,
    const int* __restrict__ activations, int rows, int x_stride, int x_group, int y_stride) {
  extern __shared__ __align__(16) elem shared[];
  const unsigned w_at = (unsigned)__cvta_generic_to_shared(shared), x_at = w_at + STAGES * BN * STRIDE * 2;
  if (BEGIN_NEXT == 1) let_next_begin();
  const int column = blockIdx.x * BN, inner = BN < 32 ? column % 32 : 0;
  const long long* line = lines + column / 32 * 6;
  const int depth = (int)line[3], w_stride = (depth + 15) / 16 * 16;
  const int own_rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
  const int steps = (depth + BK - 1) / BK;
  // A thread copies 16 bytes of every SKIP-th row, always at the same place of a stage.
  constexpr unsigned PER_ROW = BK / 8, SKIP = THREADS / PER_ROW;
  const unsigned own_row = threadIdx.x / PER_ROW, own_k = threadIdx.x % PER_ROW * 8;
  const char* w_from = (const char*)(w + line[2] + (size_t)(inner + own_row) * w_stride + own_k);
  const char* x_from = (const char*)(x + line[0] * x_group + line[1] + (size_t)(blockIdx.y * ROWS + own_row) * x_stride + own_k);
  const unsigned own_at = (own_row * STRIDE + own_k) * 2;
  const size_t w_skip = (size_t)SKIP * w_stride * 2, x_skip = (size_t)SKIP * x_stride * 2;
  auto fetch_w = [&](int step) {
    const unsigned to = w_at + own_at + step % STAGES * (BN * STRIDE * 2);
    const char* from = w_from + (size_t)step * (BK * 2);
    const int bytes = step * BK + (int)own_k < w_stride ? 16 : 0, is_wanted = step < steps;
    #pragma unroll
    for (int i = 0; i < BN; i += SKIP, from += w_skip) copy_ahead(to + i * STRIDE * 2, from, bytes, is_wanted);
  };
  auto fetch_x = [&](int step) {
    const unsigned to = x_at + own_at + step % STAGES * (ROWS * STRIDE * 2);
    const char* from = x_from + (size_t)step * (BK * 2);
    const int bytes = min(max((depth - step * BK - (int)own_k) * 2, 0), 16), wanted = step < steps ? own_rows - (int)own_row : 0;
    #pragma unroll
    for (int i = 0; i < ROWS; i += SKIP, from += x_skip) copy_ahead(to + i * STRIDE * 2, from, bytes, i < wanted);
  };
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch_w(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // rows that do not exist are zero in every stage
  for (int s = 0; s < STAGES; s++)
    for (int row = own_row; row < ROWS; row += SKIP)
      if (row >= own_rows) *(uint4*)(shared + (STAGES * BN + s * ROWS + row) * STRIDE + own_k) = make_uint4(0, 0, 0, 0);
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    fetch_x(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  if (BEGIN_NEXT == 3) let_next_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned w_lane = w_at + ((warp * WN + lane % 8) * STRIDE + lane / 8 * 8) * 2;
  // one row stands in all eight of a matrix: nobody stores the sums of the others
  const unsigned x_lane = x_at + (ROWS <= 8 ? lane % 8 % ROWS * STRIDE + lane / 8 * 8 : lane % 16 * STRIDE + lane / 16 * 8) * 2;
  float c[MT][NT][4];
  #pragma unroll
  for (int t = 0; t < MT; t++)
    #pragma unroll
    for (int n = 0; n < NT; n++) c[t][n][0] = c[t][n][1] = c[t][n][2] = c[t][n][3] = 0.f;
  // Between two stages a warp still has sums to add whose operands are in its registers: nothing waits for the first of the next.
  constexpr int TURNS = BK / KC;
  static_assert(TURNS % 2 == 0, "operands are held twice");
  Operands now[2];
  auto load = [&](Operands& to, int step, int turn) {
    to.load(w_lane + step % STAGES * (BN * STRIDE * 2), x_lane + step % STAGES * (ROWS * STRIDE * 2), turn * KC);
  };
  auto wait_for_stage = [&]() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    if (THREADS == 32) __syncwarp(); else __syncthreads();
  };
  wait_for_stage();
  load(now[0], 0, 0);
  for (int step = 0; step < steps; step++) {
    load(now[1], step, 1);
    fetch_w(step + STAGES - 1);  // where all warps have read what they need, since they have begun this stage
    fetch_x(step + STAGES - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (turn > 0 && turn + 1 < TURNS) load(now[(turn + 1) % 2], step, turn + 1);
      if (turn + 1 == TURNS) { wait_for_stage(); load(now[0], step + 1, 0); }  // behind the last stage: for nothing
      now[turn % 2].multiply_into(c);
    }
  }
  if (BEGIN_NEXT == 2) let_next_begin();
  #pragma unroll
  for (int t = 0; t < MT; t++) {
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = t * 16 + lane / 4 + e / 2 * 8, at = warp * WN + n * 8 + lane % 4 * 2 + e % 2;
        if (row < own_rows && at < columns) {
          float value = c[t][n][e];
          if (activation) value = activated(widen(round_only(value)), activation);
          out_t* to = y + ((size_t)blockIdx.y * ROWS + row) * y_stride + first + at;
#if OUT32
          *to = value;
#else
          *to = round_only(value);
#endif
        }
      }
    }
  }
}
#endif
