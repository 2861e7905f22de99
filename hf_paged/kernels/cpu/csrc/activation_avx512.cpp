#include "vec_avx512.h"

#include "activation_table.h"

const hf_paged::ActivationKernels hf_paged::activation_avx512 = {hf_paged::avx512::apply};
