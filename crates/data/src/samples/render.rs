//! From a record to tokens: the kind, the template, the tokenizer, and what is learnt.

use ferrospeed_text::{ChatTemplate, Codec, Sample, TrainOn};
use serde_json::Value;

use super::kind::{Content, SampleKind};

/// How samples become tokens.
#[derive(Debug)]
pub struct Rendering {
    /// How a conversation becomes text; `None` where neither model nor recipe has a template.
    pub template: Option<ChatTemplate>,
    /// What is learnt.
    pub train_on: TrainOn,
}

impl Rendering {
    /// The tokens of a record, or what is wrong with it.
    pub(crate) fn sample(&self, kind: SampleKind, record: &Value, codec: &Codec) -> Result<Sample, String> {
        let sample = match kind.read(record)? {
            Content::Conversation(conversation) => {
                let template = self.template.as_ref().ok_or(
                    "is a conversation, and the model brings no chat template; name one with data.chat_template, \"chatml\" or a file",
                )?;
                Sample::of_conversation(&conversation, template, codec, self.train_on)
            }
            Content::Completion { prompt, completion } => {
                Sample::of_completion(codec, &prompt, &completion, self.train_on)
            }
            Content::Text(text) => Sample::of_plain(codec, &text),
        };
        sample.map_err(|error| error.to_string())
    }

    /// What a cache of tokens depends on.
    pub(crate) fn key(&self) -> String {
        let template = self.template.as_ref().and_then(ChatTemplate::key).unwrap_or_default();
        format!("{}:{template}", self.train_on.name())
    }
}

impl PartialEq for Rendering {
    fn eq(&self, other: &Rendering) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Rendering {}
