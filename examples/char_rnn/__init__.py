r"""Train recurrent language models dense and pruned, and compare them at equal numbers of weights.

Each model predicts a text character by character with an LSTM or GRU. It trains by the recipe of
Zhu et al. 2018, "Sparse Persistent RNNs: Squeezing Large Recurrent Networks On-Chip", appendix B:
dense at first, then pruned to its density every half epoch, and at the end with a fixed pattern;
the last epoch of it on the sparse model, where only stored weights have gradients. The table, like
table 2 of the paper, has large sparse models beside small dense ones; the score is bits per
character on held-out text.

    python -m examples.char_rnn                                  # about two minutes on two cores
    python -m examples.char_rnn --hidden 256:0.0625 256:0.0625:unstructured
    python -m examples.char_rnn --data book.txt --hidden 128 512:0.0625 --cell gru
    python -m examples.char_rnn --preset h200                    # the sizes of the paper, for a GPU

--hidden names the models: units, after a colon the density to prune to, and after another one the
structure of the masks, where it is not that of --structure. Without --data they learn from the help
texts that come with Python (pydoc_data.topics). --data takes any text file, in UTF-8 or, with
--tokens bytes, of any kind.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once. --resume goes on from there: finished models
are kept, the result is that of an unbroken run, to the last bit on a CPU, and --hidden may name
further models. The text must be the same.
"""
