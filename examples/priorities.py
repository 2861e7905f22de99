"""Urgent requests first: the priority policy orders who is admitted next, and who gives way when blocks run out."""

import argparse

from hf_paged import LLM, PagedConfig, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

# One request at a time, so that the order shows.
llm = LLM(model=path, paged_config=PagedConfig(scheduling_policy="priority", max_num_seqs=1))

jobs = {"write the yearly report": 9, "answer the customer": 1, "sort the archive": 5, "stop the leak": 0}
params = SamplingParams(temperature=0, max_tokens=8)
outputs = llm.generate([f"How to {job}:" for job in jobs], params, use_tqdm=False, priority=list(jobs.values()))

finished = sorted(zip(jobs, outputs, strict=True), key=lambda pair: pair[1].metrics.finished_time)
for place, (job, output) in enumerate(finished, 1):
    print(f"{place}. priority {jobs[job]}: {job} -> {output.outputs[0].text!r}")
assert [jobs[job] for job, _ in finished] == sorted(jobs.values()), "the most urgent finished first"
