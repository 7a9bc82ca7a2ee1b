//! What `launch` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod golden;
mod hostile;
mod local_job;
mod written;
