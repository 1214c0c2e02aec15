"""Hybrids of Gated DeltaNet and gated attention with a block selector: "qwen4_exp" of transformers, "qwen4exp" in GGUF.

Sources: transformers, models/qwen4_exp/modeling_qwen4_exp.py; "Gated Delta Networks" (arXiv 2412.06464);
"Hyper-Connections" (arXiv 2409.19606).
"""
