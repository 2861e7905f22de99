"""A column of a `datasets.Dataset` through our pipeline: continuous batching, in order, and bad rows are no end."""

import argparse

from datasets import Dataset
from tqdm import tqdm
from transformers.pipelines.pt_utils import KeyDataset

import hf_paged
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

things = ["sky", "sea", "grass", "snow", "night", "desert"]
chats = [[{"role": "user", "content": f"Which colour is the {thing}? Answer in one word."}] for thing in things]
data = Dataset.from_dict({"thing": [*things, "nothing"], "chat": [*chats, []]})  # the last chat has no message

generator = hf_paged.pipeline("text-generation", model=path)
results = generator(KeyDataset(data, "chat"), max_new_tokens=8, do_sample=False, return_full_text=False)
answers = [
    f"failed: {row.cause}" if isinstance(row, hf_paged.RowFailedError) else row[0]["generated_text"]
    for row in tqdm(results, desc="rows")
]

for row in data.add_column("answer", answers):
    print(f"{row['thing']}: {row['answer']!r}")
