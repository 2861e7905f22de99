"""An attention backend of your own: a class with declared capabilities and one method, chosen by its name."""

import argparse

import torch
import torch.nn.functional as F

from hf_paged import LLM, PagedConfig, SamplingParams
from hf_paged.kernels import BACKENDS, Capabilities, PagedAttentionBackend
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())


@BACKENDS.register("simple")
class SimpleBackend(PagedAttentionBackend):
    """Gathers the blocks of one request after the other and calls torch's attention. `store` is inherited."""

    name = "simple"
    capabilities = Capabilities(frozenset({"cpu", "cuda"}), frozenset({torch.float32, torch.bfloat16}), frozenset())
    automatic_devices = frozenset()  # only when it is asked for by name

    def attend(self, query, key_cache, value_cache, metadata, *, scale, **features):
        """See `PagedAttentionBackend.attend`."""
        outputs, first = [], 0
        lengths = zip(metadata.query_lens_host.tolist(), metadata.seq_lens_host.tolist(), strict=True)
        for request, (new, length) in enumerate(lengths):
            blocks = metadata.block_tables[request, : -(-length // metadata.block_size)].long()
            keys, values = (c[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length] for c in (key_cache, value_cache))
            queries = query[first : first + new].transpose(0, 1)[None]
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)
            output = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
            first += new
        return torch.cat(outputs)


prompts = ["The first month of the year is", "Cats and dogs are"]
params = SamplingParams(temperature=0, max_tokens=12)
answers = {}
for name in ("simple", "torch_sdpa"):
    llm = LLM(model=path, dtype="float32", paged_config=PagedConfig(attn_backend=name))
    answers[name] = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    print(f"{name}: {answers[name]}")
    llm.close()
assert answers["simple"] == answers["torch_sdpa"], "both compute the same attention"
