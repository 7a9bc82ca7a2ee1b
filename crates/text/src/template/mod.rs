//! How a conversation becomes a prompt: the model's own Jinja template.
//!
//! It is read from `chat_template.jinja` or from `tokenizer_config.json`, and rendered with what Hugging Face gives such
//! templates: `raise_exception`, `strftime_now`, `tojson`, Python's methods of strings, lists and dictionaries, no blank
//! lines for blocks. A template cannot read files; its work, and what it writes, are bounded. A model without one gets a plain one:
//! `role: text` by lines.

use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Map;

use crate::error::{Result, TextError};
use crate::named;
use crate::template::functions::{now_s, strftime, to_json};
use crate::template::marks::Marks;

mod functions;
mod marks;
mod widths;

/// Templates are some thousands of characters long.
const MAX_TEMPLATE_BYTES: u64 = 1 << 18;
/// A template may be one expression of as many terms as it has bytes, which is read to its end before it is known: on a stack that is
/// taken as far as it is used.
const STACK_BYTES: usize = 1 << 30;
/// Some tables of tokens are in the same file.
const MAX_CONFIG_BYTES: u64 = 1 << 26;
/// Steps that rendering may take: far more than a conversation that fits a model needs.
const FUEL: u64 = 5_000_000;
/// Bytes that it may write: far more than the longest text of any model. What it builds on the way, in variables, is not counted.
const MAX_PROMPT_BYTES: usize = 64 << 20;

const PLAIN: &str =
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A model's template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: Vec<(String, String)>,
    source: Option<String>,
    marks_generation: bool,
}

impl ChatTemplate {
    /// The template of the model in `directory`.
    pub fn of_model(directory: &Path) -> Result<ChatTemplate> {
        let (file, config_file) =
            (directory.join("chat_template.jinja"), directory.join("tokenizer_config.json"));
        let read = |path: &PathBuf| -> Result<Option<String>> {
            if !path.exists() {
                return Ok(None);
            }
            let text = ferrospeed_files::read(path, MAX_CONFIG_BYTES)
                .map_err(|error| bad(path, error.to_string()))
                .and_then(|bytes| String::from_utf8(bytes).map_err(|error| bad(path, error.to_string())))?;
            Ok(Some(text))
        };
        let config: serde_json::Value = match read(&config_file)? {
            Some(text) => {
                serde_json::from_str(&text).map_err(|error| bad(&config_file, error.to_string()))?
            }
            None => serde_json::Value::Null,
        };
        match read(&file)? {
            Some(source) => ChatTemplate::checked(&file, Some(source), &config),
            None => ChatTemplate::of_config(&config_file, &config),
        }
    }

    /// The template of a file, or the one that is known by that name, with the special tokens of the tokenizer whose files lie in
    /// `directory`.
    pub fn of_name(name: &str, directory: Option<&Path>) -> Result<ChatTemplate> {
        let path = Path::new(name);
        let source = match named::source(name) {
            Some(source) => source.to_owned(),
            None if path.exists() => ferrospeed_files::read_text(path, MAX_TEMPLATE_BYTES)
                .map_err(|error| bad(path, error.to_string()))?,
            None => return Err(TextError::NoSuchTemplate { name: name.to_owned() }),
        };
        let config = directory.map(|directory| directory.join("tokenizer_config.json"));
        let said = config.and_then(|config| ferrospeed_files::read(&config, MAX_CONFIG_BYTES).ok());
        let said = said.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        ChatTemplate::checked(path, Some(source), &said)
    }

    /// The template in the content of a `tokenizer_config.json` that was found in the file `path`.
    pub fn of_config(path: &Path, config: &serde_json::Value) -> Result<ChatTemplate> {
        ChatTemplate::checked(path, of_config(config), config)
    }

    fn checked(path: &Path, source: Option<String>, config: &serde_json::Value) -> Result<ChatTemplate> {
        if let Some(source) = &source
            && source.len() as u64 > MAX_TEMPLATE_BYTES
        {
            return Err(bad(path, format!("its chat template is longer than {MAX_TEMPLATE_BYTES} bytes")));
        }
        let tokens = ["bos_token", "eos_token", "unk_token", "pad_token"].iter().filter_map(|&name| {
            let token = &config[name];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.to_owned(), text.to_owned()))
        });
        ChatTemplate::new(source, tokens.collect()).map_err(|error| bad(path, describe(&error)))
    }

    /// A template from its source; the plain one without.
    pub fn new(source: Option<String>, tokens: Vec<(String, String)>) -> Result<ChatTemplate, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(100);
        widths::bound(&mut environment);
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, now_s()));
        environment.add_filter("tojson", to_json);
        let written = source.as_deref().unwrap_or(PLAIN);
        let readable = marks::readable(written);
        let marks_generation = readable != written;
        read_deep(&mut environment, readable)?;
        Ok(ChatTemplate { environment, tokens, source, marks_generation })
    }

    /// Whether the model brought none.
    pub fn is_plain(&self) -> bool {
        self.source.is_none()
    }

    /// Whether it marks itself what the assistant says, by `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// What it is written in, where it is not the plain one.
    pub fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// What it writes is a function of this: its source and the special tokens that it may name.
    pub fn key(&self) -> Option<String> {
        let tokens = self.tokens.iter().map(|(name, text)| format!("{name}={text}\n"));
        Some(tokens.collect::<String>() + self.source.as_deref()?)
    }

    /// The same template once more.
    pub fn again(&self) -> Result<ChatTemplate> {
        ChatTemplate::new(self.source.clone(), self.tokens.clone())
            .map_err(|error| TextError::Rendering(error.to_string()))
    }

    /// The text of a special token by its name, `eos_token`.
    pub(crate) fn token(&self, name: &str) -> Option<&str> {
        self.tokens.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str())
    }

    /// The prompt that asks for the assistant's next message. The error is the template's own word, for the client.
    pub fn render(&self, messages: &[Message]) -> Result<String, String> {
        let messages: Vec<_> = messages.iter().map(|message| serde_json::json!(message)).collect();
        self.prompt(&Request { messages: &messages, tools: None, asks: true, variables: &Map::new() })
    }

    /// The prompt of a conversation, with the tools that may be called and what else the template is told.
    pub fn prompt(&self, request: &Request<'_>) -> Result<String, String> {
        self.write(request).map(|written| written.text)
    }

    /// The prompt that has the assistant go on in the middle of the conversation's last message.
    pub fn prompt_within(&self, request: &Request<'_>) -> Result<String, String> {
        let last = request.messages.last().map_or("", |message| message["content"].as_str().unwrap_or(""));
        let last = last.trim();
        if last.is_empty() {
            return Err("the last message says nothing that could be gone on with".into());
        }
        let mut text = self.prompt(&Request { asks: false, ..*request })?;
        match text.rfind(last) {
            Some(place) => {
                text.truncate(place + last.len());
                Ok(text)
            }
            None => {
                Err("chat template: it writes the last message in other words, so nothing can go on with it"
                    .into())
            }
        }
    }

    /// What it writes for a request.
    pub(crate) fn write(&self, request: &Request<'_>) -> Result<Written, String> {
        let mut context = serde_json::Map::new();
        for (name, text) in &self.tokens {
            context.insert(name.clone(), text.as_str().into());
        }
        context.extend(request.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        context.insert("messages".into(), request.messages.into());
        context.insert("tools".into(), request.tools.cloned().unwrap_or_default());
        context.insert("documents".into(), serde_json::Value::Null);
        context.insert("add_generation_prompt".into(), request.asks.into());
        let marks = Marks::default();
        let mut out = Bounded { marks: marks.clone(), ..Bounded::default() };
        let context = minijinja::context! { ..marks.functions(), ..Value::from_serialize(&context) };
        let rendered = self
            .environment
            .get_template("chat")
            .and_then(|template| template.render_captured_to(context, &mut out).map(drop));
        match rendered {
            Err(_) if out.is_over => {
                Err(format!("chat template: it writes more than {MAX_PROMPT_BYTES} bytes"))
            }
            Err(error) => Err(describe(&error)),
            Ok(()) => {
                let text = String::from_utf8(out.bytes).map_err(|error| format!("chat template: {error}"))?;
                Ok(Written { text, generated: marks.spans() })
            }
        }
    }
}

/// What a template is asked to write.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The messages, as [`crate::Conversation::messages`] has them.
    pub messages: &'a [serde_json::Value],
    /// The tools that may be called.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the assistant is to go on: `add_generation_prompt`.
    pub asks: bool,
    /// What else it is told, such as `enable_thinking`.
    pub variables: &'a Map<String, serde_json::Value>,
}

/// What a template wrote.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) text: String,
    /// Its bytes between `{% generation %}` and `{% endgeneration %}`.
    pub(crate) generated: Vec<Range<usize>>,
}

/// What a template has written, up to a bound.
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    /// Hears how much there is.
    marks: Marks,
    is_over: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len().saturating_add(bytes.len()) > MAX_PROMPT_BYTES {
            self.is_over = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        self.marks.written(self.bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Reads a template on a stack of its own.
fn read_deep(environment: &mut Environment<'static>, source: String) -> Result<(), Error> {
    let read = || environment.add_template_owned("chat", source);
    std::thread::scope(|scope| {
        let reader = std::thread::Builder::new().name("template".into()).stack_size(STACK_BYTES);
        let reader = reader.spawn_scoped(scope, read).map_err(|error| {
            Error::new(ErrorKind::InvalidOperation, format!("no thread to read the template: {error}"))
        })?;
        reader.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::InvalidOperation, "it cannot be read")))
    })
}

fn bad(file: &Path, why: String) -> TextError {
    TextError::bad_file(file, why)
}

fn describe(error: &Error) -> String {
    format!("chat template: {}", error.detail().map_or_else(|| error.to_string(), str::to_owned))
}

/// One template, or the one called `default` of several.
fn of_config(config: &serde_json::Value) -> Option<String> {
    match &config["chat_template"] {
        serde_json::Value::String(source) => Some(source.clone()),
        serde_json::Value::Array(several) => {
            let default = several.iter().find(|one| one["name"] == "default").or(several.first())?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(parts: &[(&str, &str)]) -> Vec<Message> {
        parts
            .iter()
            .map(|(role, content)| Message { role: (*role).into(), content: (*content).into() })
            .collect()
    }

    fn render(source: &str, parts: &[(&str, &str)]) -> Result<String, String> {
        let tokens = vec![("bos_token".to_owned(), "<s>".to_owned())];
        ChatTemplate::new(Some(source.to_owned()), tokens).unwrap().render(&messages(parts))
    }

    #[test]
    fn templates_speak_as_hugging_face_ones_do() {
        let source = "{{ bos_token }}{% for m in messages %}\n    {%- if m['role'] == 'user' %}\n[U]{{ m.content.strip() }}\n    \
             {%- elif loop.last %}\n{{ raise_exception('no ' + m.role.upper()) }}\n    {%- endif %}\n{% endfor %}\
             {% if add_generation_prompt %}[A]{% endif %}";
        assert_eq!(render(source, &[("user", "  hi ")]).unwrap(), "<s>[U]hi[A]");
        assert_eq!(render(source, &[("robot", "x")]).unwrap_err(), "chat template: no ROBOT");
        assert_eq!(
            render("{{ messages | tojson }}", &[("user", "é\"")]).unwrap(),
            r#"[{"role": "user", "content": "é\""}]"#
        );
        assert_eq!(
            render("{{ messages[0].content.split('</t>')[-1] }}", &[("user", "a</t>b")]).unwrap(),
            "b"
        );
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
        assert!(render(endless, &[]).is_err());
    }

    #[test]
    fn a_template_that_writes_without_end_is_stopped_before_memory_is() {
        // 200 GB, in far fewer steps than it is given.
        let content = "x".repeat(2 << 20);
        let source = "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}";
        let refused = render(source, &[("user", &content)]).unwrap_err();
        assert_eq!(refused, "chat template: it writes more than 67108864 bytes");
        assert_eq!(render("{{ messages[0].content }}", &[("user", &content)]).unwrap(), content);
    }

    #[test]
    fn a_template_that_asks_for_wide_fields_is_stopped_and_narrow_ones_are_written() {
        for wide in [
            "{{ 'x'|indent(99999999999) }}",
            "{{ 'x'|indent(width=99999999999) }}",
            "{{ 'x'|indent(99999999999999999999999999) }}",
            "{{ '{:>9999999999}'.format(1) }}",
            "{{ '%9999999999d'|format(1) }}",
            "{{ '%*d'|format(9999999999, 1) }}",
        ] {
            let refused = render(wide, &[]).expect_err(wide);
            assert!(refused.contains("columns"), "{wide}: {refused}");
        }
        assert_eq!(render("{{ 'a\nb'|indent(2) }}|{{ '{:>3}'.format(1) }}", &[]).unwrap(), "a\n  b|  1");
        assert_eq!(render("{{ 'a\nb'|indent(width=1, first=true) }}", &[]).unwrap(), " a\n b");
    }

    #[test]
    fn a_template_of_one_long_expression_is_read() {
        let long = format!("{{{{ {}1 }}}}", "1+".repeat(60_000));
        assert_eq!(render(&long, &[]).unwrap(), "60001");
        let nots = format!("{{{{ {}true }}}}", "not ".repeat(50_000));
        assert!(render(&nots, &[]).is_ok() || render(&nots, &[]).unwrap_err().contains("template"));
    }

    #[test]
    fn a_model_without_a_template_gets_lines() {
        let folder = tempfile::tempdir().unwrap();
        let plain = ChatTemplate::of_model(folder.path()).unwrap();
        assert!(plain.is_plain());
        let asked = plain.render(&messages(&[("system", "be kind"), ("user", "hi")]));
        assert_eq!(asked.unwrap(), "system: be kind\nuser: hi\nassistant:");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "tokenizer_config.json",
            r#"{"bos_token": {"content": "<b>"}, "chat_template":
            [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ bos_token }}!"}]}"#,
        );
        assert_eq!(ChatTemplate::of_model(folder.path()).unwrap().render(&[]).unwrap(), "<b>!");
        write("chat_template.jinja", "{{ bos_token }}?");
        assert_eq!(ChatTemplate::of_model(folder.path()).unwrap().render(&[]).unwrap(), "<b>?");
        write("chat_template.jinja", "{% if %}");
        assert!(
            ChatTemplate::of_model(folder.path()).unwrap_err().to_string().contains("chat_template.jinja")
        );
    }
}
