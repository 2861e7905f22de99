#include "vec_avx2.h"

#include "norm_kernels.h"

const hf_paged::NormKernels hf_paged::norm_avx2 = {hf_paged::avx2::norm<hf_paged::avx2::RMS>,
                                                 hf_paged::avx2::norm<hf_paged::avx2::LAYER_NORM>};
