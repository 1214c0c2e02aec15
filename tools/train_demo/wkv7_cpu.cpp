// The RWKV-7 scan on the CPU in float32, forward only, head size 64: makes evaluation without a GPU bearable.
//
// Tensors are [sequence][time][head][64] as in wkv7_train.cu; w is already the decay factor. One task per (sequence,
// head) walks the time from the zero state, S [value i][key j] held row after row.
//
//   g++ -O3 -march=native -ffast-math -fopenmp -shared -fPIC -o libwkv7_cpu.so wkv7_cpu.cpp

#include <cstddef>

extern "C" int wkv7_cpu_forward(int sequences, int steps, int heads, const float* r, const float* w, const float* k,
                                const float* v, const float* a, const float* b, float* y) {
  constexpr int kHead = 64;
#pragma omp parallel for schedule(dynamic)
  for (int task = 0; task < sequences * heads; task++) {
    alignas(64) float S[kHead][kHead] = {};
    const size_t base = (static_cast<size_t>(task / heads) * steps * heads + task % heads) * kHead;
    for (int t = 0; t < steps; t++) {
      const size_t at = base + static_cast<size_t>(t) * heads * kHead;
      for (int i = 0; i < kHead; i++) {
        float sa = 0.f, out = 0.f;
        const float v_row = v[at + i];
        for (int j = 0; j < kHead; j++) sa += S[i][j] * a[at + j];
        for (int j = 0; j < kHead; j++) {
          S[i][j] = S[i][j] * w[at + j] + (sa * b[at + j] + v_row * k[at + j]);
          out += S[i][j] * r[at + j];
        }
        y[at + i] = out;
      }
    }
  }
  return 0;
}
