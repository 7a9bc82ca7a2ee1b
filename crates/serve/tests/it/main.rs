//! What `serve` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod auto_tp;
mod chat_page;
mod engine;
mod forms;
mod gguf;
mod golden_inference;
mod hostile;
mod http;
mod hybrid;
mod schedule;
mod support;
