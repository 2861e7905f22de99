"""`transformers serve` on the paged engine: eight clients chat at the same time and share the model's steps.

The server runs here in this process; from the command line it is `hf-paged transformers-serve MODEL`.
"""

import argparse
import concurrent.futures
import socket
import time

from openai import OpenAI

from hf_paged.tools.packaged_model import packaged_model_path
from hf_paged.tools.transformers_serve import make_server

QUESTIONS = ("What is a baker?", "Name a colour.", "What is 2 + 2?", "Who are you?")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
parser.add_argument("--max-tokens", type=int, default=16, help="tokens of an answer")
arguments = parser.parse_args()
path = arguments.model or str(packaged_model_path())

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = make_server(path, host="127.0.0.1", port=port)
while not server.server.started:
    time.sleep(0.05)
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")


def chat(question: str) -> str:
    """Asks one question and streams the answer."""
    stream = client.chat.completions.create(
        model=path,
        messages=[{"role": "user", "content": question}],
        max_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


try:
    alone = [chat(question) for question in QUESTIONS]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        together = list(clients.map(chat, QUESTIONS * 2))
    for question, text in zip(QUESTIONS, together, strict=False):
        print(f"{question} {text!r}")
    same = sum(text == alone[i % len(QUESTIONS)] for i, text in enumerate(together))
    print(f"{same} of {len(together)} answers are those of a client alone")
finally:
    server.kill_server()
