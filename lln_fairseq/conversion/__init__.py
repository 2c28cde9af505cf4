"""Conversion of encoders between this project and Hugging Face, fairseq and ONNX.

`convert` turns a Hugging Face or fairseq model into a checkpoint of this project. `export` turns such a checkpoint into
a Hugging Face directory, optionally with an ONNX model.
"""
