//! How a conversation becomes a prompt: the model's own Jinja template.
//!
//! It is read from `chat_template.jinja` or from `tokenizer_config.json`, and rendered with what Hugging Face gives such
//! templates: `raise_exception`, `strftime_now`, `tojson`, Python's methods of strings, lists and dictionaries, no blank
//! lines for blocks. A template cannot read files; its work, and what it writes, are bounded. A model without one gets a plain one:
//! `role: text` by lines.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use crate::error::{Result, ServeError};

/// Templates are some thousands of characters long.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
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
    is_plain: bool,
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
            let text = ferrospeed_files::read(path, MAX_TEMPLATE_BYTES * 64)
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
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, now_s()));
        environment.add_filter("tojson", to_json);
        let is_plain = source.is_none();
        environment.add_template_owned("chat", source.unwrap_or_else(|| PLAIN.to_owned()))?;
        Ok(ChatTemplate { environment, tokens, is_plain })
    }

    /// Whether the model brought none.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// The prompt that asks for the assistant's next message. The error is the template's own word, for the client.
    pub fn render(&self, messages: &[Message]) -> Result<String, String> {
        let mut context = serde_json::Map::new();
        for (name, text) in &self.tokens {
            context.insert(name.clone(), text.as_str().into());
        }
        context.insert("messages".into(), serde_json::json!(messages));
        context.insert("add_generation_prompt".into(), true.into());
        let mut prompt = Bounded::default();
        let rendered = self.environment.get_template("chat").and_then(|template| {
            template.render_captured_to(Value::from_serialize(&context), &mut prompt).map(drop)
        });
        match rendered {
            Err(_) if prompt.is_over => {
                Err(format!("chat template: it writes more than {MAX_PROMPT_BYTES} bytes"))
            }
            Err(error) => Err(describe(&error)),
            Ok(()) => String::from_utf8(prompt.bytes).map_err(|error| format!("chat template: {error}")),
        }
    }
}

/// What a template has written, up to a bound.
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    is_over: bool,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len().saturating_add(bytes.len()) > MAX_PROMPT_BYTES {
            self.is_over = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn bad(file: &Path, why: String) -> ServeError {
    ServeError::Template { file: file.to_path_buf(), why }
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

/// Python's `json.dumps`: a blank behind `:` and `,`; `indent` where it is asked for.
fn to_json(value: &Value, options: minijinja::value::Kwargs) -> Result<Value, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let indent: Option<usize> = options.get("indent")?;
    // Python's other options change nothing that a model was trained to see.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    match indent {
        Some(indent) => {
            let blanks = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
                .map_err(|error| failed(&error))?;
        }
        None => value
            .serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced))
            .map_err(|error| failed(&error))?,
    }
    String::from_utf8(bytes).map(Value::from_safe_string).map_err(|error| failed(&error))
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The directives that templates use for dates, in UTC; another one is an error.
fn strftime(format: &str, now_s: u64) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (now_s / 86_400, now_s % 86_400);
    let (year, month, day) = ferrospeed_observe::civil_date(days);
    let (name, weekday) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        out += &match letters.next() {
            Some('Y') => format!("{year:04}"),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('b') => name[..3].to_owned(),
            Some('B') => name.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => {
                let what =
                    format!("strftime_now does not know %{}", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
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
    fn dates_are_those_of_the_calendar() {
        let said = |now_s| strftime("%a %d %b %Y, %A %e %B %H:%M:%S %m %%", now_s).unwrap();
        assert_eq!(said(0), "Thu 01 Jan 1970, Thursday  1 January 00:00:00 01 %");
        assert_eq!(said(951_825_599), "Tue 29 Feb 2000, Tuesday 29 February 11:59:59 02 %");
        assert_eq!(said(4_107_542_400), "Mon 01 Mar 2100, Monday  1 March 00:00:00 03 %");
        assert!(strftime("%Q", 0).is_err());
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
