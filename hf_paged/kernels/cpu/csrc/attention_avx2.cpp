#include "vec_avx2.h"

#include "attention_kernels.h"

namespace hf_paged {

extern const AttentionKernels attention_avx2 = avx2::table<avx2::OfNumbers>;

}  // namespace hf_paged
