#include "vec_avx512.h"

#include "attention_kernels.h"

namespace hf_paged {

extern const AttentionKernels attention_codes_avx512 = avx512::table<avx512::OfCodes>;

}  // namespace hf_paged
