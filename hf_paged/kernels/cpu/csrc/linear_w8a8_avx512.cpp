#include "vec_avx512.h"

#include "int16_pairs.h"
#include "linear_w8a8.h"

namespace hf_paged {

extern const LinearKernels linear_w8a8_avx512 = avx512::w8a8_table(64);

}  // namespace hf_paged
