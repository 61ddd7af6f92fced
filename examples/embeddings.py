"""Which texts are similar? Embeddings of the embedded model, which was trained to generate. For good embeddings give an
embedding checkpoint, encoder or decoder, as `model`; then `runner` is not needed."""

from mainspring import LLM, PoolingParams

texts = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is 3 plus 4?",
    "Once upon a time there was a bear.",
]

with LLM(runner="pooling") as llm:
    for text in texts:
        found = llm.score(text, texts, use_tqdm=False)
        print(" ".join(f"{one.outputs.score:6.2f}" for one in found), "", text)

    (short,) = llm.embed(texts[0], pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
    print("the first four dimensions:", [round(x, 2) for x in short.outputs.embedding])
    (rows,) = llm.encode(texts[0], pooling_task="token_embed", use_tqdm=False)
    print("a vector for each token:", rows.outputs.data.shape)
