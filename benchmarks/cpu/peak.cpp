// Peak rates of the instructions that matrix products are made of, from registers, with all threads at once:
//
//     peak THREADS   ->   {"fma_peak": 4.5e11, "bf16_peak": 9.1e11, "bf16_unit": "vdpbf16ps"}
//
// Operations per second (a multiplication and an addition are two), the best of several short runs. `null` where this
// processor has no such unit. x86 only; elsewhere this file does not compile, and nothing is reported.

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int kChains = 12;  // independent sums, enough to hide the latency of four cycles on two units
constexpr long kRounds = 400000;
constexpr int kRepeats = 60;  // of a millisecond or two each

volatile float sink;

__attribute__((target("avx2,fma"))) double fma_avx2() {
    __m256 sums[kChains];
    const __m256 factor = _mm256_set1_ps(1e-8f);
#pragma GCC unroll 12  // all three loops: or the sums would lie in memory
    for (auto& sum : sums) sum = factor;
    for (long round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm256_fmadd_ps(factor, factor, sums[chain]);
#pragma GCC unroll 12
        for (auto& sum : sums) asm volatile("" : "+x"(sum));
    }
#pragma GCC unroll 12
    for (auto& sum : sums) sink = _mm256_cvtss_f32(sum);
    return 2.0 * 8 * kChains * kRounds;
}

__attribute__((target("avx512f"))) double fma_avx512() {
    __m512 sums[kChains];
    const __m512 factor = _mm512_set1_ps(1e-8f);
#pragma GCC unroll 12  // all three loops: or the sums would lie in memory
    for (auto& sum : sums) sum = factor;
    for (long round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm512_fmadd_ps(factor, factor, sums[chain]);
#pragma GCC unroll 12
        for (auto& sum : sums) asm volatile("" : "+v"(sum));
    }
#pragma GCC unroll 12
    for (auto& sum : sums) sink = _mm512_cvtss_f32(sum);
    return 2.0 * 16 * kChains * kRounds;
}

__attribute__((target("avx512f,avx512bf16"))) double dot_bf16() {
    __m512 sums[kChains];
    const __m512 factor = _mm512_set1_ps(1e-8f);
    const __m512bh pairs = _mm512_cvtne2ps_pbh(factor, factor);
#pragma GCC unroll 12  // all three loops: or the sums would lie in memory
    for (auto& sum : sums) sum = factor;
    for (long round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) sums[chain] = _mm512_dpbf16_ps(sums[chain], pairs, pairs);
#pragma GCC unroll 12
        for (auto& sum : sums) asm volatile("" : "+v"(sum));
    }
#pragma GCC unroll 12
    for (auto& sum : sums) sink = _mm512_cvtss_f32(sum);
    return 2.0 * 32 * kChains * kRounds;
}

// Eight tiles: four sums of 16 x 16 from two left and two right factors of 16 x 32.
__attribute__((target("amx-tile,amx-bf16"))) double tiles_amx() {
    alignas(64) unsigned char config[64] = {};
    config[0] = 1;
    for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = 64;  // bytes in a row
        config[48 + tile] = 16;      // rows
    }
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    const long rounds = kRounds / 8;
    for (long round = 0; round < rounds; ++round) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * rounds;
}

bool may_use_amx() {
    unsigned eax, ebx, ecx, edx;
    const bool known = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
    if (!known || !(edx >> 22 & 1) || !(edx >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
}

double rate(double (*work)(), int threads) {
    double best = 0;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        std::vector<std::thread> others;
        std::vector<double> operations(threads);
        const auto begin = std::chrono::steady_clock::now();
        for (int index = 1; index < threads; ++index)
            others.emplace_back([&, index] { operations[index] = work(); });
        operations[0] = work();
        for (auto& other : others) other.join();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        double total = 0;
        for (double value : operations) total += value;
        best = std::max(best, total / seconds.count());
    }
    return best;
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
    __builtin_cpu_init();
    const char* unit = nullptr;
    double fma = 0, bf16 = 0;
    if (__builtin_cpu_supports("avx512f")) {
        fma = rate(fma_avx512, threads);
    } else if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2")) {
        fma = rate(fma_avx2, threads);
    }
    if (may_use_amx()) {
        unit = "AMX", bf16 = rate(tiles_amx, threads);
    } else if (__builtin_cpu_supports("avx512bf16")) {
        unit = "vdpbf16ps", bf16 = rate(dot_bf16, threads);
    }
    std::printf("{\"fma_peak\": ");
    if (fma > 0)
        std::printf("%.4g", fma);
    else
        std::printf("null");
    if (unit)
        std::printf(", \"bf16_peak\": %.4g, \"bf16_unit\": \"%s\"}\n", bf16, unit);
    else
        std::printf(", \"bf16_peak\": null, \"bf16_unit\": null}\n");
    return 0;
}
