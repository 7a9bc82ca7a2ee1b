//! From a record to tokens: the kind, the template, the tokenizer, and what is learnt.

use ferrospeed_text::{ChatTemplate, Codec, Sample, TrainOn};
use serde_json::Value;

use super::kind::{Content, SampleKind, completion};
use super::pair;

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
        self.content(kind.read(record)?, codec)
    }

    /// The tokens of both answers of a record, the preferred one first.
    pub(crate) fn pair(&self, record: &Value, codec: &Codec) -> Result<[Sample; 2], String> {
        SampleKind::Preference.expect(record)?;
        let (chosen, rejected) = pair::of(record)?;
        Ok([self.content(chosen, codec)?, self.content(rejected, codec)?])
    }

    /// The tokens of one record's prompt with another's completion.
    pub(crate) fn crossed(&self, asking: &Value, answering: &Value, codec: &Codec) -> Result<Sample, String> {
        let content = completion(&asking["prompt"], &answering["completion"], asking.get("tools"));
        let why = "and the record before it, whose completion is held against it, are neither both texts nor both lists of messages";
        self.content(content.map_err(|_| why.to_owned())?, codec)
    }

    fn content(&self, content: Content, codec: &Codec) -> Result<Sample, String> {
        let sample = match content {
            Content::Conversation(conversation) => {
                let template = self.template.as_ref().ok_or(
                    "is a conversation, and the model brings no chat template; name one with data.chat_template (of `eval`, --chat-template), \"chatml\" or a file",
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
