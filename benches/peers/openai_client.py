#!/usr/bin/env python3
"""The official `openai` client against a running `ferrospeed serve`: chat, streams, log probabilities, embeddings.

    pip install openai            # written for 3.49
    ferrospeed serve DIR --port 8000 &
    python benches/peers/openai_client.py http://127.0.0.1:8000 [KEY]

Ends with an error where an answer is not what the client's own types promise.
"""
import sys

import openai

base, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=60)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Say hello."}]

whole = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
text = whole.choices[0].message.content
assert whole.choices[0].finish_reason in ("stop", "length"), whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
print("chat:", repr(text))

stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
)
pieces, usage = [], None
for piece in stream:
    usage = piece.usage or usage
    pieces += [choice.delta.content or "" for choice in piece.choices]
assert "".join(pieces) == text, (pieces, text)
assert usage == whole.usage, (usage, whole.usage)
print("stream:", len(pieces), "pieces")

told = client.chat.completions.create(
    model=model, messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, n=2, seed=1
)
for choice in told.choices:
    for token in choice.logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3, token
        assert token.top_logprobs[0].logprob == token.logprob, token
print("logprobs:", [(token.token, round(token.logprob, 3)) for token in told.choices[0].logprobs.content])

completion = client.completions.create(model=model, prompt=["Once", "Twice"], max_tokens=5, logprobs=2, stop=["\n\n"])
assert [choice.index for choice in completion.choices] == [0, 1], completion
streamed = client.completions.create(model=model, prompt="Once", max_tokens=5, stream=True)
print("completions:", len(list(streamed)), "pieces")

vectors = client.embeddings.create(model=model, input=["one", "two"]).data
for vector in vectors:
    assert abs(sum(x * x for x in vector.embedding) - 1) < 1e-4
print("embeddings:", len(vectors), "of", len(vectors[0].embedding))

for wrong, kind in [
    (dict(messages=messages, temperature=9), openai.BadRequestError),
    (dict(messages=messages, model="another"), openai.NotFoundError),
    (dict(messages=[]), openai.BadRequestError),
]:
    try:
        client.chat.completions.create(**{"model": model, **wrong})
    except kind as error:
        assert error.body["message"], error
    else:
        raise AssertionError(f"{wrong} was not refused")
print("refusals: by name")
print("openai", openai.__version__, "is content")
