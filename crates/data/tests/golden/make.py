"""Writes the files that the data tests read: pip install numpy pyarrow tokenizers; python make.py

Every file is written by the library that owns its format, or, for Megatron's index, by the layout that Megatron-LM's
IndexedDatasetBuilder writes. expected.json holds what must be read from them.
"""

import json
import os
import struct

import numpy
import pyarrow
import pyarrow.parquet
import tokenizers

os.chdir(os.path.dirname(os.path.abspath(__file__)))

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "",
    "Žluťoučký kůň úpěl ďábelské ódy 🐎\nand a second line\t\"quoted\" \\ back\r\n",
    "   leading and trailing spaces   ",
    "1234567890 " * 40,
    "\u2028 separators \u0000 and a null",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n",
] + [f"document {i}: " + " ".join(str(i * j % 97) for j in range(i % 40)) for i in range(200)]


def json_lines():
    with open("texts.jsonl", "w", encoding="utf-8", newline="\n") as out:
        for index, text in enumerate(TEXTS):
            row = {"id": index, "meta": {"text": "not this one", "tags": ["a", None]}, "text": text}
            out.write(json.dumps(row, ensure_ascii=index % 2 == 0) + "\n")


def parquet():
    # A null between texts, several row groups, a dictionary that overflows into plain pages, data pages of version 2.
    texts = TEXTS[:3] + [None] + TEXTS[3:]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, "tags": [["x", "y"]] * len(texts)})
    for name, options in {
        "snappy": {"compression": "snappy", "row_group_size": 50},
        "gzip": {"compression": "gzip", "row_group_size": 64, "data_page_version": "2.0"},
        "lz4": {"compression": "lz4", "dictionary_pagesize_limit": 256, "data_page_size": 512},
        "brotli": {"compression": "brotli", "use_dictionary": False},
        "none": {"compression": "none", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        "zstd": {"compression": "zstd"},
    }.items():
        pyarrow.parquet.write_table(table, f"texts-{name}.parquet", **options)


def tokenizer():
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.enable_truncation(max_length=8)  # a trap: it must not cut the data
    bpe.save("tokenizer.json")
    bpe.no_truncation()
    end = bpe.token_to_id("<|endoftext|>")
    return [id for text in TEXTS if text for id in bpe.encode(text).ids + [end]]


def nano_gpt(tokens):
    numpy.array(tokens, dtype=numpy.uint16).tofile("tokens-u16.bin")
    numpy.array([t + 70000 for t in tokens], dtype=numpy.uint32).tofile("tokens-u32.bin")


CODES = {numpy.uint8: 1, numpy.int16: 3, numpy.int32: 4, numpy.int64: 5, numpy.uint16: 8}


def megatron(prefix, sequences, dtype, order=None):
    """`order` places sequences in the .bin in another order than the index names them."""
    order = order or list(range(len(sequences)))
    pointers, offset = [0] * len(sequences), 0
    with open(prefix + ".bin", "wb") as out:
        for index in order:
            data = numpy.array(sequences[index], dtype=dtype).tobytes()
            pointers[index] = offset
            offset += len(data)
            out.write(data)
    documents = list(range(len(sequences) + 1))
    with open(prefix + ".idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00")
        out.write(struct.pack("<Q", 1))
        out.write(struct.pack("<B", CODES[dtype]))
        out.write(struct.pack("<Q", len(sequences)))
        out.write(struct.pack("<Q", len(documents)))
        out.write(numpy.array([len(s) for s in sequences], dtype=numpy.int32).tobytes())
        out.write(numpy.array(pointers, dtype=numpy.int64).tobytes())
        out.write(numpy.array(documents, dtype=numpy.int64).tobytes())


def main():
    json_lines()
    parquet()
    tokens = tokenizer()
    nano_gpt(tokens)
    sequences = [[(i * 31 + j) % 500 for j in range(i % 7)] for i in range(60)]
    megatron("megatron-u16", sequences, numpy.uint16)
    megatron("megatron-i32", sequences, numpy.int32, order=list(range(30, 60)) + list(range(30)))
    with open("expected.json", "w", encoding="utf-8") as out:
        json.dump(
            {"texts": TEXTS, "tokens": tokens, "megatron": [t for s in sequences for t in s]}, out, ensure_ascii=True
        )
        out.write("\n")


main()
