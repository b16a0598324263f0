"""The small chat model that ships with the package: its text, tokenizer, training and evaluation.

The model is a Llama of a few million parameters whose one skill is recall. It is told facts early in a dialogue and
answers questions about them up to about 1,500 tokens later. So it is an instrument: an approximation of the KV cache
that loses information shows up as lost answers.

    python -m scripts.small_model.train --out build/model --minutes 35
    python -m scripts.small_model.train --out build/model --resume
    python -m scripts.small_model.train --evaluate build/model
"""
