#include "vec_avx512.h"

#include "attention_kernels.h"

namespace hf_paged {

extern const AttentionKernels attention_avx512 = {avx512::few_rows_by_dtype, avx512::many_rows_by_dtype, avx512::merge,
                                                avx512::scratch_size};

}  // namespace hf_paged
