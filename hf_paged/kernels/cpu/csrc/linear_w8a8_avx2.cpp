#include "vec_avx2.h"

#include "int16_pairs.h"
#include "linear_w8a8.h"

namespace hf_paged {

extern const LinearKernels linear_w8a8_avx2 = avx2::w8a8_table(16);

}  // namespace hf_paged
