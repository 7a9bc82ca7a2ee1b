//! Text to tokens, for training and serving alike: what is trained is what is served.
//!
//! A [`Codec`] is a tokenizer, a [`ChatTemplate`] how a conversation becomes text. A [`Sample`] is an example to learn from:
//! tokens, and which of them the loss counts.
//!
//! ```
//! use ferrospeed_text::{ChatTemplate, Codec, Conversation, Sample, TrainOn};
//!
//! let messages = serde_json::json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Ho" }]);
//! let conversation = Conversation::new(&messages, None)?;
//! let template = ChatTemplate::of_name("chatml", None)?;
//! let sample = Sample::of_conversation(&conversation, &template, &Codec::Bytes, TrainOn::Assistant)?;
//! let learnt = sample.tokens.iter().zip(&sample.trained).filter(|(_, trained)| **trained);
//! let learnt: Vec<i64> = learnt.map(|(token, _)| i64::from(*token)).collect();
//! assert_eq!(Codec::Bytes.decode(&learnt)?, "Ho<|im_end|>");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod codec;
mod conversation;
mod error;
mod named;
mod sample;
pub mod template;
mod token_bytes;
mod tokenizer_limits;
mod turns;

pub use codec::{Codec, FileTokenizer};
pub use conversation::Conversation;
pub use error::{Result, TextError};
pub use sample::Sample;
pub use template::{ChatTemplate, Message};
pub use token_bytes::Written;
pub use turns::{TrainOn, asked_text, trained_text};

#[cfg(test)]
extern crate self as ferrospeed_text;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
