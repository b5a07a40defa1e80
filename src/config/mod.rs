//! Configuration: an operator's parameters from a file, the environment and the program. Feature `config`.
//!
//! ```text
//!   app.toml ──┐
//!   variables ─┼─> layers, the later before the earlier ──> get("upper"): a section as a type of the user's
//!   overrides ─┘                                      └──> deny_unused: what nobody asked for
//! ```
//!
//! The layers are merged by [figment], section by section; each also stays as it was, so that an error can say which
//! file and line, which variable or which call a value is from. Types are strict: `rate = 2.5` is no integer, and neither
//! is `rate = "2"`. A field that the type does not have is an error, whether it says `deny_unknown_fields` or not.

mod document;
mod fields;
mod layer;
mod limited;

use std::{
    cell::RefCell, collections::BTreeSet, ffi::OsString, fmt, mem::ManuallyDrop, panic::Location, path::Path, slice,
    sync::OnceLock,
};

use figment::{
    Figment,
    error::{Actual, Kind},
    value::{Dict, Empty, Tag, Value},
};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};

use self::layer::{Layer, joined};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// Parameters of a program's operators: of one or more files, of the environment, and of the program itself. What comes
/// later lies on top of what came before.
///
/// ```
/// use serde::Deserialize;
/// use wakeline::Config;
///
/// #[derive(Deserialize)]
/// struct UpperParams {
///     rate: u32,
///     #[serde(default)]
///     greeting: String,
/// }
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("app.toml");
/// std::fs::write(&path, "[upper]\nrate = 3\ngreeting = 'hello'\n")?;
/// let config = Config::file(&path)?.env("WAKELINE_APP")?.set("upper.rate", 5)?;
/// let params: UpperParams = config.get("upper")?;
/// assert_eq!((params.rate, &*params.greeting), (5, "hello"));
/// config.deny_unused()?;
/// # Ok::<(), wakeline::Error>(())
/// ```
///
/// A key is names joined by dots: `upper.rate` is `rate` in the section `[upper]`. The variable for it is
/// `WAKELINE_APP_UPPER__RATE`: the prefix, then the names in capitals, with two underscores between them.
/// A name with a dot in it, which stands in quotes in a file, is no part of a key: it is read with its section, into a map.
#[derive(Default)]
pub struct Config {
    layers: Vec<Layer>,
    merged: Figment,
    /// What that gives, once it is asked for.
    whole: OnceLock<Value>,
    /// The keys that were asked for.
    asked: Mutex<BTreeSet<String>>,
}

impl Config {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What a TOML file says.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if it cannot be read or is no TOML, with the line; if its tables and arrays lie in each
    /// other more than 64 levels deep.
    pub fn file(path: impl AsRef<Path>) -> Result<Self> {
        Self::new().with_file(path)
    }

    /// A further file on top.
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn with_file(self, path: impl AsRef<Path>) -> Result<Self> {
        Ok(self.with(Layer::file(path.as_ref())?))
    }

    /// The environment on top, as it is now: the variables that begin with `PREFIX_`. A value is read as TOML is, so `5`,
    /// `true` and `[1, 2]` are what they look like; what is no TOML is a text. A text that looks like something else
    /// stands in quotes.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) for a variable that is not UTF-8, whose key has an empty name in it (`PREFIX_A____B`), or whose
    /// key and value have more than 64 levels.
    pub fn env(self, prefix: &str) -> Result<Self> {
        self.with_variables(prefix, std::env::vars_os())
    }

    fn with_variables(self, prefix: &str, all: impl Iterator<Item = (OsString, OsString)>) -> Result<Self> {
        let layers = layer::variables(prefix, all)?;
        let mut config = layers.into_iter().fold(self, Self::with);
        // It may have said nothing, and still is where to say something.
        config.layers.push(Layer::nothing(layer::Place::Environment(prefix.into())));
        Ok(config)
    }

    /// One value on top: an argument of the command line, a test's own.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) for a value that a file could not say either, an empty name in the key, or more than 64
    /// levels of both.
    #[track_caller]
    pub fn set(self, key: &str, value: impl Serialize) -> Result<Self> {
        let layer = Layer::set(key, value, Location::caller())?;
        Ok(self.with(layer))
    }

    fn with(mut self, layer: Layer) -> Self {
        self.merged = self.merged.merge(&layer);
        self.whole = OnceLock::new();
        self.layers.push(layer);
        self
    }

    /// A section, or a single value, as a type; for the empty key, all there is. A section that is not there is an empty
    /// one: right for a type all of whose fields have defaults; and for an `Option`, `None`.
    ///
    /// Fields of a type with `#[serde(flatten)]` are not known, so an unknown one is not found there.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with what is wrong: fields that are unknown (and those that there are), one that is
    /// missing, or of another type (and what was expected), with its key and with the file and line, the variable or the
    /// call that said so. What comes after a value of another type is not looked at. Also for a key with an empty name in it.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        if !key.is_empty() && key.split('.').any(str::is_empty) {
            let text = format!("`{key}` is no key: names joined by dots, none of them empty");
            return Err(Error::new(ErrorKind::Setup, text));
        }
        self.asked.lock().insert(key.into());
        let (outcome, unknown) = match self.whole().find_ref(key) {
            Some(value) => read::<T>(value),
            None => match read::<T>(&Value::Empty(Tag::Default, Empty::None)) {
                (Err(_), _) => read::<T>(&Value::from(Dict::new())),
                found => found,
            },
        };
        let key = keys_of(key);
        let mut problems: Vec<String> = unknown.iter().map(|path| self.unknown::<T>(&key, path)).collect();
        match outcome {
            Ok(value) if problems.is_empty() => return Ok(value),
            Ok(_) => {}
            Err(errors) => problems.extend(errors.into_iter().map(|error| self.explain(&key, error))),
        }
        Err(Error::new(
            ErrorKind::Setup,
            match &problems[..] {
                [one] => one.clone(),
                many => format!("{} problems:\n  - {}", many.len(), many.join("\n  - ")),
            },
        ))
    }

    /// The keys that were set and that nobody has asked for, not even as a part of a section: an operator's name with a
    /// slip in it, or what was forgotten there.
    pub fn unused(&self) -> Vec<String> {
        self.unused_keys().iter().map(|keys| joined(keys)).collect()
    }

    fn unused_keys(&self) -> Vec<Vec<String>> {
        let asked = self.asked.lock();
        let mut unused = Vec::new();
        if !asked.contains("")
            && let Some(all) = self.whole().as_dict()
        {
            leftover(&[], all, &asked, &mut unused);
        }
        unused
    }

    /// An error if there is something [`unused`](Self::unused). To be called when every operator has got its own.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with each of them, and where it stands.
    pub fn deny_unused(&self) -> Result<()> {
        let unused = self.unused_keys();
        if unused.is_empty() {
            return Ok(());
        }
        let told = unused.iter().map(|keys| format!("`{}`{}", joined(keys), self.at(keys))).collect::<Vec<_>>();
        let text = format!("nothing uses {}: is it another operator's name, or one too many?", told.join(" and "));
        Err(Error::new(ErrorKind::Setup, text))
    }

    fn whole(&self) -> &Value {
        let nothing = || Value::Empty(Tag::Default, Empty::None);
        self.whole.get_or_init(|| self.merged.find_value("").unwrap_or_else(|_| nothing()))
    }

    fn find(&self, keys: &[String]) -> Option<&Value> {
        layer::find(self.whole().as_dict()?, keys)
    }

    /// The layer that a key's value is from, and where it stands there.
    fn origin(&self, keys: &[String]) -> Option<(&Layer, String)> {
        // Of an array's elements nobody remembers the place, but that of the array.
        let mut sections = (1..=keys.len()).rev().map(|len| &keys[..len]);
        sections.find_map(|keys| self.layers.iter().rev().find_map(|layer| Some((layer, layer.at(keys)?))))
    }

    fn at(&self, keys: &[String]) -> String {
        self.origin(keys).map(|(_, place)| format!(" in {place}")).unwrap_or_default()
    }

    fn unknown<T: DeserializeOwned>(&self, section: &[String], path: &[String]) -> String {
        let known = path.split_last().and_then(|(_, parents)| fields::of::<T>(parents));
        let all = [section, path].concat();
        unknown_field(&all, &self.at(&all), known)
    }

    /// What is wrong, in one line.
    fn explain(&self, section: &[String], error: figment::Error) -> String {
        let mut all = [section, &error.path].concat();
        let key = |keys: &[String]| format!("`{}`{}", joined(keys), self.at(keys));
        match &error.kind {
            Kind::MissingField(field) => {
                all.push(field.to_string());
                self.missing(&all)
            }
            Kind::UnknownField(_, known) => unknown_field(&all, &self.at(&all), Some(known)),
            // It is not there at all, and was read as an empty section.
            Kind::InvalidType(Actual::Map, _) if self.find(&all).is_none() => self.missing(&all),
            Kind::InvalidType(found, expected) => {
                let variable = self.origin(&all).is_some_and(|(layer, _)| layer.is_variable());
                let quotes = if variable && expected.contains("string") { ": put it in quotes" } else { "" };
                format!("{} is {found}, and {expected} is expected{quotes}", key(&all))
            }
            Kind::InvalidValue(found, expected) => format!("{} is {found}, and {expected} is expected", key(&all)),
            Kind::UnknownVariant(found, known) => {
                format!("{} is `{found}`, and one of {} is expected", key(&all), list(known))
            }
            other => format!("{}: {other}", key(&all)),
        }
    }

    fn missing(&self, keys: &[String]) -> String {
        let ways: Vec<_> = self.layers.iter().filter_map(|layer| layer.way_to_set(keys)).collect();
        let ways = if ways.is_empty() { "by `Config::set`".into() } else { ways.join(", or ") };
        format!("`{}` is missing: set it {ways}", joined(keys))
    }
}

fn keys_of(key: &str) -> Vec<String> {
    key.split('.').filter(|name| !name.is_empty()).map(String::from).collect()
}

fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn unknown_field(keys: &[String], place: &str, known: Option<&[&str]>) -> String {
    let known = match known {
        Some([]) => ": there are none there".into(),
        Some(known) => format!(": there are {}", list(known)),
        None => String::new(),
    };
    format!("`{}`{place} is no parameter{known}", joined(keys))
}

/// Keys with values of which nobody has asked for any part, or which nobody has asked for as a whole.
fn leftover(section: &[String], values: &Dict, asked: &BTreeSet<String>, unused: &mut Vec<Vec<String>>) {
    for (name, value) in values {
        let keys = [section, slice::from_ref(name)].concat();
        let key = joined(&keys);
        let inside = format!("{key}.");
        match value {
            _ if asked.contains(&key) => {}
            Value::Dict(_, values)
                if asked.range(inside.clone()..).next().is_some_and(|first| first.starts_with(&inside)) =>
            {
                leftover(&keys, values, asked, unused);
            }
            _ => unused.push(keys),
        }
    }
}

/// A value as a type, and the paths of the fields that the type does not have.
fn read<T: DeserializeOwned>(value: &Value) -> (Result<T, figment::Error>, Vec<Vec<String>>) {
    /// Deserializes as `T`, and tells of what it ignores even if it fails.
    struct Seen<T>(T);

    thread_local! {
        /// `ManuallyDrop`: usable in the destructors of the thread's other locals, too. Below it is left as it was found.
        static IGNORED: ManuallyDrop<RefCell<Vec<Vec<String>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    }

    impl<'de, T: Deserialize<'de>> Deserialize<'de> for Seen<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let note = |path: serde_ignored::Path<'_>| IGNORED.with(|all| all.borrow_mut().push(keys_on(&path)));
            serde_ignored::deserialize(deserializer, note).map(Self)
        }
    }

    // A field's own `Deserialize` may read another configuration.
    let before = IGNORED.with(|all| all.take());
    let outcome = value.deserialize::<Seen<T>>().map(|seen| seen.0);
    (outcome, IGNORED.with(|all| all.replace(before)))
}

fn keys_on(path: &serde_ignored::Path<'_>) -> Vec<String> {
    use serde_ignored::Path;

    let (parent, key) = match path {
        Path::Root => return Vec::new(),
        Path::Seq { parent, index } => (parent, Some(index.to_string())),
        Path::Map { parent, key } => (parent, Some(key.clone())),
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => (parent, None),
    };
    let mut keys = keys_on(parent);
    keys.extend(key);
    keys
}

impl fmt::Debug for Config {
    /// Where it is from, and no values: they may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config").field("layers", &self.layers).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What no test can do to its own environment.
    #[cfg(unix)]
    #[test]
    fn a_variable_that_is_no_text_is_named() {
        use std::os::unix::ffi::OsStringExt;

        let variables = |name: &str| [(OsString::from(name), OsString::from_vec(vec![0xff]))].into_iter();
        let error = Config::new().with_variables("APP", variables("APP_UPPER__NAME")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        assert!(error.to_string().contains("the variable `APP_UPPER__NAME` is no UTF-8"), "{error}");
        Config::new().with_variables("APP", variables("APPLE_UPPER__NAME")).unwrap();
    }
}
