#include "vec_avx512.h"

#include "norm_kernels.h"

const hf_paged::NormKernels hf_paged::norm_avx512 = {hf_paged::avx512::norm<hf_paged::avx512::RMS>,
                                                 hf_paged::avx512::norm<hf_paged::avx512::LAYER_NORM>};
