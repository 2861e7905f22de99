"""A generator of 10,000 prompts through our pipeline: rows are drawn as seats get free, and memory stays flat."""

import argparse
import time

import psutil

import hf_paged
from hf_paged import PagedConfig
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
parser.add_argument("--rows", type=int, default=10_000, help="how many prompts there are")
arguments = parser.parse_args()
path = arguments.model or str(packaged_model_path())


def prompts():
    for number in range(arguments.rows):
        yield f"{number} and {number % 97} are"


def memory() -> float:
    return psutil.Process().memory_info().rss / 2**20


# The pool of blocks becomes real memory as blocks are first used: a small one is soon all in use.
generator = hf_paged.pipeline(
    "text-generation", model=path, paged_config=PagedConfig(cpu_kv_cache_gib=0.25), max_new_tokens=4, do_sample=False
)
started, num_done, before = time.perf_counter(), 0, 0.0
for (result,) in generator(prompts()):
    assert result["generated_text"].startswith(f"{num_done} and ")
    num_done += 1
    if num_done == max(arguments.rows // 10, 1):
        before = memory()  # by now every buffer has been made
    if num_done % max(arguments.rows // 10, 1) == 0:
        print(f"{num_done:6d} rows, {num_done / (time.perf_counter() - started):6.1f} rows/s, {memory():7.1f} MiB")

print(f"memory grew by {memory() - before:.1f} MiB after the first tenth of {num_done} rows")
