#include "vec_avx2.h"

#include "attention_kernels.h"

namespace hf_paged {

extern const AttentionKernels attention_avx2 = {avx2::few_rows_by_dtype, avx2::many_rows_by_dtype, avx2::merge,
                                                avx2::scratch_size};

}  // namespace hf_paged
