//! Configuration: operators' parameters from files, the environment and the program. Feature `config`.
//!
//! ```text
//!   app.toml ──┐
//!   variables ─┼─> layers, later ones override earlier ones ──> get("upper"): a section as a user's type
//!   overrides ─┘                                         └──> deny_unused: an error for keys that were not read
//! ```
//!
//! [figment] merges the layers section by section. Each layer is also kept, so that an error can name the file and
//! line, the variable or the call that set a value. Types are strict: neither `rate = 2.5` nor `rate = "2"` is an
//! integer. An unknown field is an error even without `deny_unknown_fields`.

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

/// The parameters of a program's operators, from files, the environment and the program itself. Later sources override
/// earlier ones.
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
/// A key consists of names joined by dots: `upper.rate` is `rate` in the section `[upper]`. Its variable is
/// `WAKELINE_APP_UPPER__RATE`: the prefix, then the names in capitals, separated by two underscores.
/// A name with a dot in it, which is quoted in a file, cannot be part of a key: read its section into a map.
#[derive(Default)]
pub struct Config {
    layers: Vec<Layer>,
    merged: Figment,
    /// The merged value, computed at the first read.
    whole: OnceLock<Value>,
    read_keys: Mutex<BTreeSet<String>>,
}

impl Config {
    /// Creates an empty configuration.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a TOML file.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if the file cannot be read or is not TOML, with the line, or if its tables and
    /// arrays are nested more than 64 levels deep.
    pub fn file(path: impl AsRef<Path>) -> Result<Self> {
        Self::new().with_file(path)
    }

    /// Adds a TOML file, which overrides earlier sources.
    ///
    /// # Errors
    /// Those of [`file`](Self::file).
    pub fn with_file(self, path: impl AsRef<Path>) -> Result<Self> {
        Ok(self.with(Layer::file(path.as_ref())?))
    }

    /// Adds the environment variables whose names begin with `PREFIX_`, with their current values. They override earlier
    /// sources. A value is parsed as TOML: `5`, `true` and `[1, 2]` are a number, a boolean and an array. Anything that is not
    /// TOML is a string. Quote a string that would parse as another type.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) for a variable that is not UTF-8, whose key contains an empty name
    /// (`PREFIX_A____B`), or whose key and value together have more than 64 levels.
    pub fn env(self, prefix: &str) -> Result<Self> {
        self.with_variables(prefix, std::env::vars_os())
    }

    fn with_variables(self, prefix: &str, all: impl Iterator<Item = (OsString, OsString)>) -> Result<Self> {
        let layers = layer::variables(prefix, all)?;
        let mut config = layers.into_iter().fold(self, Self::with);
        // Even without variables, errors name the environment as a place to set a missing key.
        config.layers.push(Layer::empty(layer::SourceLocation::Environment(prefix.into())));
        Ok(config)
    }

    /// Sets one value, which overrides earlier sources: an argument of the command line, or a value in a test.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) for a value that TOML cannot express, an empty name in the key, or more than 64
    /// levels of key and value together.
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

    /// Deserializes a section or a single value; the empty key stands for the whole configuration. An absent section
    /// counts as an empty one, which suits a type whose fields all have defaults; an absent `Option` is `None`.
    ///
    /// The fields of a type with `#[serde(flatten)]` cannot be determined, so unknown fields are not detected there.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with the problems: unknown fields (and the known ones), a missing field, or a field
    /// of the wrong type (and the expected one), each with its key and the file and line, the variable or the call that
    /// set it. Values after one of the wrong type are not checked. Also for a key that contains an empty name.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        if !key.is_empty() && key.split('.').any(str::is_empty) {
            let text = format!("`{key}` is not a valid key: a key is non-empty names joined by dots");
            return Err(Error::new(ErrorKind::Setup, text));
        }
        self.read_keys.lock().insert(key.into());
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

    /// The keys that are set but were not read, alone or as a part of a section. They indicate a misspelt operator name
    /// or an obsolete setting.
    pub fn unused(&self) -> Vec<String> {
        self.unused_keys().iter().map(|keys| joined(keys)).collect()
    }

    fn unused_keys(&self) -> Vec<Vec<String>> {
        let read_keys = self.read_keys.lock();
        let mut unused = Vec::new();
        if !read_keys.contains("")
            && let Some(all) = self.whole().as_dict()
        {
            leftover(&[], all, &read_keys, &mut unused);
        }
        unused
    }

    /// Fails if there are [`unused`](Self::unused) keys. Call it after every operator's parameters have been read.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with each unused key and its location.
    pub fn deny_unused(&self) -> Result<()> {
        let unused = self.unused_keys();
        if unused.is_empty() {
            return Ok(());
        }
        let located = unused.iter().map(|keys| format!("`{}`{}{}", joined(keys), self.at(keys), self.intended(keys)));
        let located = located.collect::<Vec<_>>();
        let text = format!("nothing uses {}: correct the operator's name, or remove it", located.join(" and "));
        Err(Error::new(ErrorKind::Setup, text))
    }

    /// A suggestion for an unused variable such as `APP_UPPER_RATE` where `upper` is a section that was read.
    fn intended(&self, keys: &[String]) -> String {
        let Some(variable) = self.origin(keys).and_then(|(layer, _)| layer.variable()) else { return String::new() };
        let (flat, set) = (keys.join("_"), keys.join("__"));
        let read_keys = self.read_keys.lock();
        let intended = read_keys.iter().filter_map(|key| {
            let names: Vec<_> = key.split('.').collect();
            let rest = flat.strip_prefix(&names.join("_"))?;
            let section = names.join("__");
            match rest.strip_prefix('_') {
                None if rest.is_empty() => Some(section),
                Some(name) if !name.is_empty() => Some(format!("{section}__{name}")),
                _ => None,
            }
        });
        let longest = intended.filter(|intended| *intended != set).max_by_key(String::len);
        // Absent for a key within the variable's own table.
        let prefix = variable.strip_suffix(&set.to_ascii_uppercase());
        match (prefix, longest) {
            (Some(prefix), Some(key)) => format!(" (did you mean `{prefix}{}`?)", key.to_ascii_uppercase()),
            _ => String::new(),
        }
    }

    fn whole(&self) -> &Value {
        let nothing = || Value::Empty(Tag::Default, Empty::None);
        self.whole.get_or_init(|| self.merged.find_value("").unwrap_or_else(|_| nothing()))
    }

    fn find(&self, keys: &[String]) -> Option<&Value> {
        layer::find(self.whole().as_dict()?, keys)
    }

    /// The layer that set a key, and the key's location there.
    fn origin(&self, keys: &[String]) -> Option<(&Layer, String)> {
        // The locations of an array's elements are not recorded, so the array's own location is used.
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

    /// Describes the problem in one line.
    fn explain(&self, section: &[String], error: figment::Error) -> String {
        let mut all = [section, &error.path].concat();
        let key = |keys: &[String]| format!("`{}`{}", joined(keys), self.at(keys));
        match &error.kind {
            Kind::MissingField(field) => {
                all.push(field.to_string());
                self.missing(&all)
            }
            Kind::UnknownField(_, known) => unknown_field(&all, &self.at(&all), Some(known)),
            // The key is absent, and was read as an empty section.
            Kind::InvalidType(Actual::Map, _) if self.find(&all).is_none() => self.missing(&all),
            Kind::InvalidType(found, expected) => {
                let variable = self.origin(&all).is_some_and(|(layer, _)| layer.variable().is_some());
                let quotes = if variable && expected.contains("string") { ": put it in quotes" } else { "" };
                format!("{} is {found}, but {expected} is expected{quotes}", key(&all))
            }
            Kind::InvalidValue(found, expected) => format!("{} is {found}, but {expected} is expected", key(&all)),
            Kind::UnknownVariant(found, known) => {
                format!("{} is `{found}`, but one of {} is expected", key(&all), list(known))
            }
            other => format!("{}: {other}", key(&all)),
        }
    }

    fn missing(&self, keys: &[String]) -> String {
        let ways: Vec<_> = self.layers.iter().filter_map(|layer| layer.way_to_set(keys)).collect();
        let ways = if ways.is_empty() { "by `Config::set`".into() } else { ways.join(", or ") };
        let end = format!("_{}", keys.join("_")).to_ascii_lowercase();
        let mut variables = self.layers.iter().filter_map(Layer::variable);
        let similar = variables.find(|name| name.to_ascii_lowercase().replace("__", "_").ends_with(&end));
        let similar = similar.map(|name| format!(" (`{name}` is another key: two underscores separate names)"));
        format!("`{}` is missing: set it {ways}{}", joined(keys), similar.unwrap_or_default())
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
        Some([]) => ": the section has no parameters".into(),
        Some(known) => format!(": the parameters are {}", list(known)),
        None => String::new(),
    };
    format!("`{}`{place} is not a parameter{known}", joined(keys))
}

/// Collects the keys that were not read. A section of which some keys were read is searched; otherwise it counts as a
/// whole.
fn leftover(section: &[String], values: &Dict, read_keys: &BTreeSet<String>, unused: &mut Vec<Vec<String>>) {
    for (name, value) in values {
        let keys = [section, slice::from_ref(name)].concat();
        let key = joined(&keys);
        let inside = format!("{key}.");
        match value {
            _ if read_keys.contains(&key) => {}
            Value::Dict(_, values)
                if read_keys.range(inside.clone()..).next().is_some_and(|first| first.starts_with(&inside)) =>
            {
                leftover(&keys, values, read_keys, unused);
            }
            _ => unused.push(keys),
        }
    }
}

/// Deserializes a value. Also returns the paths of the fields that the type does not have.
fn read<T: DeserializeOwned>(value: &Value) -> (Result<T, figment::Error>, Vec<Vec<String>>) {
    /// Deserializes as `T`, and records ignored fields even if that fails.
    struct RecordIgnored<T>(T);

    thread_local! {
        /// `ManuallyDrop`, so that it is usable in the destructors of the thread's other locals. `read` restores its
        /// value.
        static IGNORED: ManuallyDrop<RefCell<Vec<Vec<String>>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    }

    impl<'de, T: Deserialize<'de>> Deserialize<'de> for RecordIgnored<T> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let note = |path: serde_ignored::Path<'_>| IGNORED.with(|all| all.borrow_mut().push(keys_on(&path)));
            serde_ignored::deserialize(deserializer, note).map(Self)
        }
    }

    // The `Deserialize` of a field may read another configuration.
    let before = IGNORED.with(|all| all.take());
    let outcome = value.deserialize::<RecordIgnored<T>>().map(|seen| seen.0);
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
    /// Prints the sources but no values, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config").field("layers", &self.layers).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test cannot safely change its own environment, so the variables are passed in.
    #[cfg(unix)]
    #[test]
    fn a_variable_that_is_not_utf8_is_named() {
        use std::os::unix::ffi::OsStringExt;

        let variables = |name: &str| [(OsString::from(name), OsString::from_vec(vec![0xff]))].into_iter();
        let error = Config::new().with_variables("APP", variables("APP_UPPER__NAME")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        assert!(error.to_string().contains("the variable `APP_UPPER__NAME` is not UTF-8"), "{error}");
        Config::new().with_variables("APP", variables("APPLE_UPPER__NAME")).unwrap();
    }
}
