// torch.ops.hf_paged.peak_flops(instruction): what all of torch's threads together do at most.
#include <chrono>
#include <string>

#include "op.h"
#include "peak.h"

namespace hf_paged {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double SECONDS = 0.02;  // of bursts; interrupted ones are longer, so the shortest counts
constexpr int LEAST_BURSTS = 16;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Operations per second of this thread.
double measure(const PeakBurst& burst) {
  double shortest = 1e9;
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < LEAST_BURSTS || seconds_since(begin) < SECONDS; i++) {
    const Clock::time_point start = Clock::now();
    burst.run();
    const double seconds = seconds_since(start);
    shortest = seconds < shortest ? seconds : shortest;
  }
  return (double)burst.operations / shortest;
}

// The burst of an instruction at the level in use, or none.
const PeakBurst* find_burst(const std::string& instruction) {
  const Isa isa = current_isa();
  if (instruction == "fma" && isa >= Isa::avx2) return isa == Isa::avx2 ? &peak_fma_avx2 : &peak_fma_avx512;
  if (instruction == "bf16_dot" && isa >= Isa::avx512 && has_bf16_dot()) return &peak_bf16_dot_avx512bf16;
  if (instruction == "amx" && isa == Isa::amx) return &peak_amx;
  return nullptr;
}

std::vector<std::string> instructions() {
  std::vector<std::string> found;
  for (const char* name : {"fma", "bf16_dot", "amx"}) {
    if (find_burst(name)) found.push_back(name);
  }
  return found;
}

// In GFLOP/s; each thread measures its own share at the same time, since cores slow each other down.
double peak_flops(std::string instruction) {
  const PeakBurst* burst = find_burst(instruction);
  STD_TORCH_CHECK(burst, "hf_paged::peak_flops: no '", instruction, "' here; see peak_instructions()");
  const int64_t threads = torch::stable::get_num_threads();
  std::vector<double> rates((size_t)threads, 0.0);
  auto one = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) rates[(size_t)i] = measure(*burst);
  };
  if (threads <= 1) {
    one(0, 1);
  } else {
    torch::stable::parallel_for(0, threads, 1, one);
  }
  double all = 0.0;
  for (double rate : rates) all += rate;
  return all / 1e9;
}

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("peak_instructions() -> str[]");
  m.def("peak_flops(str instruction) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CompositeExplicitAutograd, m) {
  m.impl("peak_instructions", TORCH_BOX(&hf_paged::instructions));
  m.impl("peak_flops", TORCH_BOX(&hf_paged::peak_flops));
}
