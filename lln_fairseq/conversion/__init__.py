"""Conversion of encoders between this project and Hugging Face, fairseq and ONNX.

`convert` reads a model of Hugging Face or fairseq and writes a checkpoint of this project. `export` writes such a
checkpoint as a Hugging Face directory, on request with an ONNX model.
"""
