r"""Train an autoregressive image Transformer with sparse attention, then draw samples from it.

The model predicts a photograph byte by byte (red, green, blue, in raster order), as in section
VII-C of Gale et al. 2020, "Sparse GPU Kernels for Deep Learning". Every position attends to a dense
band of the latest bytes and to random older ones, the likelier the nearer; all heads and layers
share this mask. The score is bits per dimension, of which a uniform guess takes 8.

    python -m examples.sparse_transformer                     # about two minutes on two cores
    python -m examples.sparse_transformer --compare           # and its dense twin beside it
    python -m examples.sparse_transformer --data cifar-10-batches-bin --size 32 --steps 5000
    python -m examples.sparse_transformer --preset paper --data train_data_batch_1.npz

Without --data it learns from the colour photographs inside the scikit-image package. --data takes
a folder of photographs, an .npz file with a uint8 array (N, height, width, 3), an .npz file of
downsampled ImageNet as it is published (a uint8 array named data, (N, 3 * side * side), planes of
red, green and blue), or CIFAR-10: the folder of its binary version, of its Python version, or of
sheets data_batch_*.png, test_batch.png with an image of 32 x 32 pixels in each row.

Ctrl-C, SIGTERM and a closed terminal (unless under nohup) save the state after the step in flight,
and a signal more than a second later quits at once; --resume goes on from there, and the
result is that of an unbroken run, to the last bit on a CPU. A GPU adds up the gradients of the
embeddings in no fixed order, unless XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""
