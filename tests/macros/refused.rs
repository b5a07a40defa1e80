//! What the macros refuse: each file of `refused` and of `one_error` has the compiler's message beside it. After an intended change:
//! `OVERWRITE=1 cargo test -p wakeline-macro-tests`, and read the difference as a user would.
//!
//! Each file goes to the compiler with the library as Cargo has just built it. trybuild would build the library and its dependencies
//! once more, in a folder and with flags of its own, which takes ten times as long as the rest of this.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::SystemTime,
};

/// The release whose messages these are. Their words change from release to release: of another one only the number of errors is
/// compared.
const RELEASE: &str = "rustc 1.95.";
/// Programs with one mistake in a declaration that the rest of the program uses: the mistake is the only error.
const ONE_ERROR: &str = "one_error";
const ROOT: &str = "../..";
/// This package's folder there.
const FOLDER: &str = "tests/macros";

#[test]
fn what_is_refused_says_what_to_write_instead() {
    let mut sources = [sources("refused"), sources(ONE_ERROR)].concat();
    sources.sort();
    let (compiler, next) = (Compiler::new(), AtomicUsize::new(0));
    compiler.assert_accepts_valid_code();
    let workers = thread::available_parallelism().map_or(1, |cores| cores.get());
    let problems: Vec<Problem> = thread::scope(|scope| {
        let check = || {
            let mine = std::iter::from_fn(|| sources.get(next.fetch_add(1, Ordering::Relaxed)));
            mine.filter_map(|source| compiler.check(source).err()).collect::<Vec<_>>()
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(check)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let text: String = problems.iter().map(ToString::to_string).collect();
    assert!(problems.is_empty(), "{} of {} files:\n{text}", problems.len(), sources.len());
}

fn sources(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let mut sources: Vec<PathBuf> = entries.map(|entry| Path::new(folder).join(entry.unwrap().file_name())).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    assert!(!sources.is_empty());
    sources
}

enum Problem {
    SeveralErrors { source: PathBuf, actual: String },
    Accepted { source: PathBuf },
    Differs { expected: PathBuf, actual: String, line: usize },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralErrors { source, actual } => {
                writeln!(f, "\n{}: more than one error for one mistake:\n{actual}", source.display())
            }
            Self::Accepted { source } => writeln!(f, "\n{} compiles", source.display()),
            Self::Differs { expected, actual, line } => {
                writeln!(f, "\n{}: another message, from line {line} on:\n{actual}", expected.display())
            }
        }
    }
}

struct Compiler {
    rustc: PathBuf,
    /// What Cargo has built for this executable, which lies there, too.
    dependencies: PathBuf,
    library: PathBuf,
    is_same_release: bool,
}

impl Compiler {
    fn new() -> Self {
        // The one beside this toolchain's Cargo.
        let rustc = env::var_os("RUSTC").map(PathBuf::from);
        let beside = || Path::new(&env::var_os("CARGO").unwrap_or_default()).with_file_name("rustc");
        let rustc = rustc.or_else(|| Some(beside()).filter(|path| path.is_file())).unwrap_or_else(|| "rustc".into());
        let this = env::current_exe().unwrap();
        let dependencies = this.parent().unwrap().to_owned();
        let library = library(&dependencies, modified(&this));
        let version = Command::new(&rustc).arg("--version").output();
        let version = version.unwrap_or_else(|error| panic!("{}: {error}", rustc.display()));
        let is_same_release = version.stdout.starts_with(RELEASE.as_bytes());
        Self { rustc, dependencies, library, is_same_release }
    }

    /// Otherwise each refusal would be one of the set-up: of a library that is not found, say.
    fn assert_accepts_valid_code(&self) {
        let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("valid.rs");
        let code = "use wakeline::prelude::*;\n#[derive(Ports)]\nstruct Valid {\n    #[input]\n    numbers: Input<u32>,\n}\n\
                    fn main() {}\n";
        fs::write(&source, code).unwrap();
        let output = self.compile(&source);
        assert!(output.status.success(), "valid code is refused:\n{}", String::from_utf8_lossy(&output.stderr));
    }

    fn compile(&self, source: &Path) -> Output {
        // Where Cargo calls it as well, so that it finds the library's sources.
        let mut command = Command::new(&self.rustc);
        command.current_dir(ROOT);
        command.args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "-Awarnings", "--out-dir"]);
        command.arg(env!("CARGO_TARGET_TMPDIR")).arg("-L").arg(format!("dependency={}", self.dependencies.display()));
        // With a target (`target/TRIPLE/debug/deps`), the macros are built for the host (`target/debug/deps`).
        if let Some(profile) = self.dependencies.parent()
            && let (Some(target), Some(name)) = (profile.parent().and_then(Path::parent), profile.file_name())
        {
            command.arg("-L").arg(format!("dependency={}", target.join(name).join("deps").display()));
        }
        command.arg("--extern").arg(format!("wakeline={}", self.library.display()));
        command.arg(source);
        command.output().unwrap_or_else(|error| panic!("{}: {error}", self.rustc.display()))
    }

    fn check(&self, source: &Path) -> Result<(), Problem> {
        let output = self.compile(&Path::new(FOLDER).join(source));
        if output.status.success() {
            return Err(Problem::Accepted { source: source.to_owned() });
        }
        let (actual, expected) = (shown(&String::from_utf8(output.stderr).unwrap()), source.with_extension("stderr"));
        let errors = |text: &str| text.lines().filter(|line| line.starts_with("error")).count();
        if source.starts_with(ONE_ERROR) && errors(&actual) != 1 {
            return Err(Problem::SeveralErrors { source: source.to_owned(), actual });
        }
        if env::var_os("OVERWRITE").is_some() {
            fs::write(&expected, &actual).unwrap();
            return Ok(());
        }
        let known = fs::read_to_string(&expected).unwrap_or_default();
        if known == actual || !self.is_same_release && errors(&known) == errors(&actual) {
            return Ok(());
        }
        let same = known.lines().zip(actual.lines()).take_while(|(known, actual)| known == actual).count();
        Err(Problem::Differs { expected, actual, line: same + 1 })
    }
}

/// The newest build of the library that is not newer than this executable. Features aside, that is the one it was built with: had a
/// source changed in between, it would have been built anew.
fn library(folder: &Path, latest: SystemTime) -> PathBuf {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libwakeline-") && name.ends_with(".rlib") && modified(path) <= latest
    };
    let library = files.filter(is_library).max_by_key(|path| modified(path));
    library.unwrap_or_else(|| panic!("no libwakeline-*.rlib in {}: run this test with `cargo test`", folder.display()))
}

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|file| file.modified()).unwrap()
}

/// A message without what depends on the machine or on line numbers in the library, and without the summary at its end.
fn shown(message: &str) -> String {
    const SUMMARY: [&str; 3] = ["error: aborting due to", "Some errors have detailed", "For more information"];
    let (mut shown, mut in_library, mut margin) = (Vec::new(), false, 0);
    for line in message.lines().take_while(|line| !SUMMARY.iter().any(|end| line.starts_with(end))) {
        let text = line.trim_start();
        let (number, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let rest = rest.trim_start();
        let has_margin = !number.is_empty() || line.starts_with(' ');
        in_library &= has_margin || line == "...";
        // As wide as the highest line number.
        shown.push(match rest.split(' ').next().unwrap_or_default() {
            arrow @ ("-->" | ":::") => {
                margin = line.len() - text.len();
                let place = rest[arrow.len()..].trim_start();
                let own = place.strip_prefix(FOLDER);
                in_library = own.is_none();
                let file = place.split_once(':').map_or(place, |(file, _)| file);
                match (own, file.split_once("/library/")) {
                    (Some(own), _) => format!("    {arrow} {}", &own[1..]),
                    (_, Some((_, std))) => format!("    {arrow} $RUST/{std}"),
                    _ => format!("    {arrow} $WORKSPACE/{file}"),
                }
            }
            "|" if in_library => format!("    {rest}"),
            "|" | "=" | "-" | "+" if has_margin => format!("{number:>3} {rest}"),
            "and" if rest.ends_with(" others") => "           and $N others".into(),
            _ if has_margin => format!("    {}", &line[margin.min(line.len() - text.len())..]),
            _ => line.replace(&format!("{FOLDER}/"), ""),
        });
    }
    let lines: Vec<_> = shown.iter().map(|line| line.trim_end()).collect();
    format!("{}\n", lines.join("\n").trim_end())
}
