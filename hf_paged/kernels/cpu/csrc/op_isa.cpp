// Operators that tell and choose the instruction set: torch.ops.hf_paged.isa() and its companions.
#include <string>

#include "isa_probe.h"
#include "op.h"

namespace hf_paged {
namespace {

// By the value of Isa; the names that HF_PAGED_CPU_ISA takes.
const char* const NAMES[] = {"torch", "avx2", "avx512", "amx"};

std::string isa() { return NAMES[(int)current_isa()]; }

std::string detected() { return NAMES[(int)detected_isa()]; }

std::vector<std::string> available() {  // the fastest first; "torch" (no native operators) is always there
  std::vector<std::string> names;
  for (int level = (int)detected_isa(); level >= 0; level--) names.push_back(NAMES[level]);
  return names;
}

void choose(std::string name) {
  std::string list;
  for (int level = (int)detected_isa(); level >= 0; level--) {
    if (name == NAMES[level]) return set_isa((Isa)level);
    list += (list.empty() ? "" : ", ") + std::string(NAMES[level]);
  }
  STD_TORCH_CHECK(false, "hf_paged::set_isa: this machine has no '", name, "'; it has ", list);
}

double bf16_dot_speedup() { return has_bf16_dot() ? bf16_dot_speedup_avx512bf16() : 0.0; }

void choose_bf16_dot(int64_t choice) { set_bf16_dot((int)choice); }

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) {
  m.def("isa() -> str");
  m.def("detected_isa() -> str");
  m.def("available_isas() -> str[]");
  m.def("set_isa(str name) -> ()");
  m.def("has_bf16_dot() -> bool");
  m.def("prefers_bf16_dot() -> bool");
  m.def("bf16_dot_speedup() -> float");
  m.def("set_bf16_dot(int choice) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&hf_paged::isa));
  m.impl("detected_isa", TORCH_BOX(&hf_paged::detected));
  m.impl("available_isas", TORCH_BOX(&hf_paged::available));
  m.impl("set_isa", TORCH_BOX(&hf_paged::choose));
  m.impl("has_bf16_dot", TORCH_BOX(&hf_paged::has_bf16_dot));
  m.impl("prefers_bf16_dot", TORCH_BOX(&hf_paged::prefers_bf16_dot));
  m.impl("bf16_dot_speedup", TORCH_BOX(&hf_paged::bf16_dot_speedup));
  m.impl("set_bf16_dot", TORCH_BOX(&hf_paged::choose_bf16_dot));
}
