//! Answers that keep to a form: JSON by a schema, a regular expression, a grammar. Before each token it is known which tokens may
//! come next; no other is chosen.
//!
//! The work is that of `llguidance`, which knows grammars over the bytes that tokens write. It needs to know those of all tokens,
//! which takes a moment: a [`Forms`] does it once for a model, when the first such answer is asked for.
//!
//! ```
//! use ferrospeed_serve::constrain::{Form, Forms};
//! use ferrospeed_text::Codec;
//!
//! let forms = Forms::new(Codec::Bytes, 256);
//! let mut constraint = forms.start(&Form::Regex("a+b".into()))?;
//! let mut logits = vec![0.0; 256];
//! constraint.forbid(&mut logits, &[])?;
//! assert_eq!(logits.iter().filter(|logit| logit.is_finite()).count(), 1, "only an a");
//! constraint.take(i64::from(b'a'))?;
//! constraint.take(i64::from(b'b'))?;
//! assert!(constraint.is_over());
//! assert!(forms.start(&Form::Regex("a(".into())).is_err());
//! # Ok::<(), String>(())
//! ```

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use ferrospeed_text::{Codec, Written};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

/// What an answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// JSON by this schema.
    Schema(Value),
    /// A text that the whole of this expression matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text by a grammar in Lark's notation, as `llguidance` reads it.
    Lark(String),
}

impl Form {
    /// Any JSON object.
    pub fn object() -> Form {
        Form::Schema(json!({"type": "object"}))
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(bounded(schema.clone())),
            Form::Regex(expression) => TopLevelGrammar::from_regex(expression),
            Form::Choice(texts) => {
                let texts: Vec<String> =
                    texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Form::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        }
    }
}

/// Between the tokens of JSON a space may stand, or a new line with its indentation. JSON itself allows any number: some models, once they
/// have begun, write nothing else.
const WHITE_SPACE: &str = r"\n[ \t]{0,32}| ";

/// The same schema, of which no answer is white space without an end.
pub(crate) fn bounded(mut schema: Value) -> Value {
    if let Value::Object(schema) = &mut schema {
        schema.entry("x-guidance").or_insert(json!({ "whitespace_pattern": WHITE_SPACE }));
    }
    schema
}

/// Makes constraints for the answers of one model.
pub struct Forms {
    codec: Codec,
    /// Tokens that the model knows.
    vocabulary: usize,
    factory: OnceLock<Result<ParserFactory, String>>,
    /// Tokens that have a meaning of their own, by their names.
    special: OnceLock<HashMap<String, usize>>,
}

impl std::fmt::Debug for Forms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forms").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Forms {
    /// For a model of so many tokens.
    pub fn new(codec: Codec, vocabulary: usize) -> Forms {
        Forms { codec, vocabulary, factory: OnceLock::new(), special: OnceLock::new() }
    }

    /// A text as a grammar in Lark's notation names it: a token that has a meaning of its own by its number.
    pub fn literal(&self, text: &str) -> String {
        let special = self.special.get_or_init(|| {
            let named = |(id, written)| match written {
                Written::Special(name) => Some((name, id)),
                Written::Bytes(_) | Written::Nothing => None,
            };
            self.codec.token_bytes().into_iter().enumerate().filter_map(named).collect()
        });
        match special.get(text) {
            Some(id) => format!("<[{id}]>"),
            None => Value::from(text).to_string(),
        }
    }

    /// Begins an answer of this form. The error says what is wrong with the form, or what of it is not known here.
    pub fn start(&self, form: &Form) -> Result<Constraint, String> {
        let factory = self.factory.get_or_init(|| factory(&self.codec, self.vocabulary)).as_ref()?;
        let parser = factory.create_parser(form.grammar()).map_err(|error| first_line(&error.to_string()))?;
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(why) => Err(first_line(&why)),
            None => Ok(Constraint { matcher, form: Arc::new(form.clone()), end: self.vocabulary }),
        }
    }
}

/// Its errors go on with the state of the parser.
fn first_line(why: &str) -> String {
    why.lines().next().unwrap_or_default().chars().take(500).collect()
}

fn factory(codec: &Codec, vocabulary: usize) -> Result<ParserFactory, String> {
    let environment: TokEnv = Arc::new(Tokens { trie: trie(codec, vocabulary), codec: codec.clone() });
    let made = ParserFactory::new_simple(&environment).map_err(|error| error.to_string());
    made.map(|mut factory| {
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory
    })
}

/// The bytes of all tokens. A token more than the model has stands for the end: which of its tokens end an answer is the
/// request's business.
fn trie(codec: &Codec, vocabulary: usize) -> TokTrie {
    let mut words: Vec<Vec<u8>> = codec.token_bytes().into_iter().map(word).collect();
    // The model may know more tokens than the tokenizer, and fewer.
    words.resize(vocabulary, Vec::new());
    words.push(word(Written::Special("<|the end|>".into())));
    TokTrie::from(&TokRxInfo::new(words.len() as u32, vocabulary as TokenId), &words)
}

fn word(written: Written) -> Vec<u8> {
    match written {
        Written::Bytes(bytes) => bytes,
        Written::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
        Written::Nothing => Vec::new(),
    }
}

struct Tokens {
    trie: TokTrie,
    codec: Codec,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let known = self.trie.vocab_size() as u32 - 1;
        let encoded = std::str::from_utf8(bytes).ok().and_then(|text| self.codec.encode(text).ok());
        match encoded.filter(|ids| ids.iter().all(|&id| id < known)) {
            Some(ids) => ids,
            None => self.trie.greedy_tokenize(bytes),
        }
    }

    /// Some tokenizers put a space before a text: what is forced must not depend on it.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// What may follow in one answer.
pub struct Constraint {
    matcher: Matcher,
    form: Arc<Form>,
    /// The token that stands for the end.
    end: usize,
}

impl Clone for Constraint {
    /// Another answer of the same form, as far as this one is: nothing of what either does is seen by the other.
    fn clone(&self) -> Constraint {
        Constraint { matcher: self.matcher.deep_clone(), form: Arc::clone(&self.form), end: self.end }
    }
}

impl PartialEq for Constraint {
    fn eq(&self, other: &Constraint) -> bool {
        self.form == other.form
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Constraint").field(&self.form).finish()
    }
}

impl Constraint {
    /// Takes every token that may not come next out of the choice. `ends`: the tokens that may end the answer where it may end.
    pub fn forbid(&mut self, logits: &mut [f32], ends: &[i64]) -> Result<(), String> {
        let place = |id: i64| usize::try_from(id).ok().filter(|&id| id < logits.len());
        let before: Vec<(usize, f32)> =
            ends.iter().filter_map(|&id| place(id)).map(|id| (id, logits[id])).collect();
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        // What comes behind the tokens that the model knows is the end.
        for id in (0..logits.len()).filter(|&id| id >= self.end || !allowed.get(id)) {
            logits[id] = f32::NEG_INFINITY;
        }
        let may_end = allowed.get(self.end);
        for (id, logit) in before {
            // It never writes what it would in the middle of a text.
            logits[id] = if may_end { logit } else { f32::NEG_INFINITY };
        }
        Ok(())
    }

    /// Takes the token that was chosen, which is none that ends the answer.
    pub fn take(&mut self, token: i64) -> Result<(), String> {
        let token = TokenId::try_from(token).map_err(|_| format!("{token} is no token"))?;
        self.matcher.consume_token(token).map_err(|error| first_line(&error.to_string()))
    }

    /// Whether nothing can follow any more.
    pub fn is_over(&self) -> bool {
        self.matcher.is_stopped()
    }
}
