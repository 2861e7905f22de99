// torch.ops.hf_paged.pin_threads(processors): keeps each of torch's worker threads on one processor.
//
// The calling thread is left where it may run: it is Python's, and threads and processes that it starts later inherit
// its mask. The first processor is meant for it.
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "op.h"

namespace hf_paged {
namespace {

#ifdef __linux__

// Whether the calling thread runs on this processor alone from now on.
bool pin(int64_t processor) {
  if (processor < 0 || processor >= CPU_SETSIZE) return false;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET((size_t)processor, &mask);
  return sched_setaffinity(0, sizeof(mask), &mask) == 0;  // 0 is the calling thread, not the process
}

// Returns how many threads were pinned. Those of the calling thread's pool only: OpenMP has one for each caller.
int64_t pin_threads(std::vector<int64_t> processors) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t count = threads < (int64_t)processors.size() ? threads : (int64_t)processors.size();
  if (count <= 1) return 0;
  const long caller = syscall(SYS_gettid);
  std::atomic<int64_t> pinned{0};
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t) {
    if (syscall(SYS_gettid) != caller && pin(processors[(size_t)begin])) pinned++;
  });
  return pinned;
}

#else

int64_t pin_threads(std::vector<int64_t>) { return 0; }

#endif

}  // namespace
}  // namespace hf_paged

STABLE_TORCH_LIBRARY_FRAGMENT(hf_paged, m) { m.def("pin_threads(int[] processors) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(hf_paged, CompositeExplicitAutograd, m) {
  m.impl("pin_threads", TORCH_BOX(&hf_paged::pin_threads));
}
