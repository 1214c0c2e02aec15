// Addition, layer norm, token shift and a mix inside the product that reads them, for a decode step of one row; to be compiled
// behind narrow.cu. Every block of the product makes the mixed row of its own input, so that it passes through no memory and no
// kernel more; what the step needs once is written by the first block.
//
// The sums of the norm are those of ops/shift_mix/triton.py as Triton lays them out: a thread has 8 columns that follow each
// other, lanes are added 16, 8, 4, 2, 1 apart, then warps, the farthest first.
//
// WIDTH: columns of a row, a multiple of BK · BLOCK: the power of two that holds it · TREE: a thread adds its columns as a tree of
// pairs (Triton 3.8), else in order (3.6) · BN, BK, STAGES as in narrow.cu, with ROWS 1 and WN 8.

#if DT != 0
#define WORKERS (BLOCK / 8)
constexpr int WARPS = WORKERS / 32;

__device__ __forceinline__ float quotient(float a, float b) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}
__device__ __forceinline__ void load_floats(float (&to)[8], const float* from, bool inside) {
  #pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 q = inside ? *(const float4*)(from + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    to[i] = q.x, to[i + 1] = q.y, to[i + 2] = q.z, to[i + 3] = q.w;
  }
}
__device__ __forceinline__ void load_elems(float (&to)[8], const elem* from, bool inside) {
  const uint4 words = inside ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
  const elem* part = (const elem*)&words;
  #pragma unroll
  for (int i = 0; i < 8; i++) to[i] = widen(part[i]);
}
__device__ __forceinline__ void store_floats(float* to, const float (&v)[8]) {
  #pragma unroll
  for (int i = 0; i < 8; i += 4) *(float4*)(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}

// The sum over a row of which each thread has 8 columns; parts: [WARPS] of shared memory.
__device__ __forceinline__ float row_sum(const float (&v)[8], float* parts) {
  float sum;
  if (TREE) {
    sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  } else {
    sum = v[0];
    #pragma unroll
    for (int i = 1; i < 8; i++) sum += v[i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = parts[threadIdx.x % WARPS];
  #pragma unroll
  for (int apart = WARPS / 2; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

// As shift_kernel of ops/shift_mix/triton.py and `product` of narrow.cu behind it, for one row; lines and out as there, every
// line's depth is WIDTH and its input a row of `mixes`. y, gate and kept may be null.
extern "C" __global__ void __launch_bounds__(WORKERS) shift_product(
    const float* x, const elem* y, const elem* gate, float* x_out, const float* norm, const float* mixes, const float* shift,
    const int* slots, float* last, float* kept, const elem* w, out_t* out, const long long* lines, const int* activations,
    int has_y, int has_gate, int keeps, int kept_stride, float scale, float eps) {
  extern __shared__ __align__(16) elem shared[];  // stages of weights, then the mixed row
  __shared__ float parts[2 * WARPS];
  if (BEGIN_NEXT == 1) let_next_begin();
  const unsigned w_at = (unsigned)__cvta_generic_to_shared(shared), x_at = w_at + STAGES * BN * STRIDE * 2;
  const int column = blockIdx.x * BN, inner = BN < 32 ? column % 32 : 0;
  const long long* line = lines + column / 32 * 6;
  constexpr int STEPS = WIDTH / BK, PER_ROW = BK / 8, SKIP = WORKERS / PER_ROW;
  const int own_row = threadIdx.x / PER_ROW, own_k = threadIdx.x % PER_ROW * 8;
  const unsigned own_at = w_at + (own_row * STRIDE + own_k) * 2;
  const char* w_from = (const char*)(w + line[2] + (size_t)(inner + own_row) * WIDTH + own_k);
  auto fetch_w = [&](int step) {
    const unsigned to = own_at + step % STAGES * (BN * STRIDE * 2);
    const char* from = w_from + (size_t)step * (BK * 2);
    #pragma unroll
    for (int i = 0; i < BN; i += SKIP, from += (size_t)SKIP * WIDTH * 2)
      copy_ahead(to + i * STRIDE * 2, from, 16, step < STEPS && (BN % SKIP == 0 || own_row + i < BN));
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch_w(s);
  const int at = threadIdx.x * 8;
  const bool inside = at < WIDTH;
  float weight[8], bias[8], before[8], mix[8];
  load_floats(weight, norm + at, inside);
  load_floats(bias, norm + WIDTH + at, inside);
  load_floats(before, shift + (size_t)slots[0] * WIDTH + at, inside);
  load_floats(mix, mixes + line[0] * WIDTH + at, inside);
  const int activation = activations[column / 32];
  const int first = (int)line[4] + inner, columns = (int)line[5] - inner;
  wait_for_inputs();
  if (BEGIN_NEXT == 3) let_next_begin();
  float here[8], more[8], gates[8];
  load_floats(here, x + at, inside);
  load_elems(more, y + at, inside && has_y);
  load_elems(gates, gate + at, inside && has_gate);
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float value = more[i] * scale;
    if (has_gate) value = value * gates[i];
    if (has_y) here[i] = here[i] + value;
  }
  const bool leads = blockIdx.x == 0 && inside;
  if (leads) store_floats(x_out + at, here);
  const float mean = quotient(row_sum(here, parts), (float)WIDTH);
  float squares[8];
  #pragma unroll
  for (int i = 0; i < 8; i++) here[i] = inside ? here[i] - mean : 0.f, squares[i] = here[i] * here[i];
  const float factor = quotient(1.f, sqrtf(quotient(row_sum(squares, parts + WARPS), (float)WIDTH) + eps));
  elem mixed[8];
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    here[i] = here[i] * factor * weight[i] + bias[i];
    before[i] = before[i] - here[i];
    mixed[i] = round_only(here[i] + before[i] * mix[i]);
  }
  if (inside)
    *(uint4*)((char*)shared + STAGES * BN * STRIDE * 2 + at * 2) = make_uint4(
        mixed[0] | (unsigned)mixed[1] << 16, mixed[2] | (unsigned)mixed[3] << 16, mixed[4] | (unsigned)mixed[5] << 16,
        mixed[6] | (unsigned)mixed[7] << 16);
  if (leads) store_floats(last + at, here);
  if (leads && keeps) store_floats(kept + at, here), store_floats(kept + kept_stride + at, before);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool sums = warp < BN / 8;
  const unsigned w_lane = w_at + (((sums ? warp : 0) * 8 + lane % 8) * STRIDE + lane / 8 * 8) * 2;
  const unsigned x_lane = x_at + lane / 8 * 8 * 2;  // one row stands in all eight of a matrix
  float c[1][1][4] = {};
  constexpr int TURNS = BK / KC;
  static_assert(TURNS % 2 == 0, "operands are held twice");
  Operands now[2];
  auto load = [&](Operands& to, int step, int turn) {
    to.load(w_lane + step % STAGES * (BN * STRIDE * 2), x_lane + min(step, STEPS - 1) * (BK * 2), turn * KC);
  };
  auto wait_for_stage = [&]() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
  };
  wait_for_stage();
  if (sums) load(now[0], 0, 0);
  for (int step = 0; step < STEPS; step++) {
    if (sums) load(now[1], step, 1);
    fetch_w(step + STAGES - 1);
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (sums && turn > 0 && turn + 1 < TURNS) load(now[(turn + 1) % 2], step, turn + 1);
      if (turn + 1 == TURNS) {
        wait_for_stage();
        if (sums) load(now[0], step + 1, 0);  // behind the last stage: for nothing
      }
      if (sums) now[turn % 2].multiply_into(c);
    }
  }
  if (BEGIN_NEXT == 2) let_next_begin();
  if (!sums || lane >= 4) return;
  #pragma unroll
  for (int e = 0; e < 2; e++) {
    const int place = warp * 8 + lane * 2 + e;
    if (place >= columns) continue;
    float value = c[0][0][e];
    if (activation) value = activated(widen(round_only(value)), activation);
    out[first + place] = round_only(value);
  }
}
#endif
