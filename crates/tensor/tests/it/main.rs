//! What `tensor` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod attention_part;
mod block_sparse;
mod devices;
mod documents;
mod errors;
mod fake_quantize;
mod golden_activation;
mod gradients;
mod gradients_structured;
mod grouped;
mod grouped_mlp;
mod halves;
mod kernels;
mod lent;
mod loss_parts;
mod mlp_chunks;
mod one_row;
mod out;
mod packed;
mod pages;
mod permute;
mod quantize;
mod rebuilt;
mod reference;
mod transformer;
