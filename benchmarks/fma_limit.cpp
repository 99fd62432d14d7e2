// GFLOP/s of fused multiply-adds in registers, on one thread: what fp32 attention can reach at most. LANES floats a vector;
// see instruction_sets.py.
#include <chrono>
#include <cstdio>

using F = float __attribute__((vector_size(4 * LANES)));

int main() {
    using Clock = std::chrono::steady_clock;
    constexpr int kChains = 12;  // more than latency times units, fewer than registers
    double best = 0;
    for (int round = 0; round < 5; ++round) {
        F x[kChains], a = F{} + 0.999f, b = F{} + 1e-6f;
        for (F& one : x) one = F{} + 1.0f;
        const long count = 10000000;
        const auto begin = Clock::now();
        for (long i = 0; i < count; ++i)
            for (F& one : x) {
                one = one * a + b;
                asm volatile("" : "+" REGISTER(one));
            }
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        const double rate = 2.0 * LANES * kChains * count / seconds / 1e9;
        best = rate > best ? rate : best;
    }
    std::printf("%.1f\n", best);
}
